"""Checkpoints: what comes back is what was saved, and damage never passes for a round."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from fedshift.engine.run import Dropped, Round, run, start
from fedshift.engine.storage import checkpoint
from fedshift.engine.storage.checkpoint import read_checkpoint, write_checkpoint
from fedshift.errors import DataError, InputError
from fedshift.recipes import Setting
from fedshift.tree import flatten
from support.every_method import MAKE
from support.federations import make_federation
from support.fuzz import different


def equal(a: Round, b: Round) -> bool:
    """Bit for bit, the order of names included."""
    if (a.t, a.trained, a.dropped) != (b.t, b.trained, b.dropped):
        return False
    if list(a.server) != list(b.server) or list(a.states) != list(b.states):
        return False
    pairs = [(a.server, b.server), *((a.states[i], b.states[i]) for i in a.states)]
    alike = torch.equal(a.cohort, b.cohort) and torch.equal(a.weights, b.weights)
    return alike and all(
        flatten(x).keys() == flatten(y).keys()
        and all(
            torch.equal(v, flatten(y)[k]) and v.dtype == flatten(y)[k].dtype
            for k, v in flatten(x).items()
        )
        for x, y in pairs
    )


@pytest.fixture
def played(setting: Setting) -> Round:
    """Two rounds of SCAFFOLD, for which not every client was drawn."""
    federation = make_federation(setting.model)
    return list(run(MAKE["scaffold"](setting), federation, 2, cohort=3))[-1]


def test_a_round_comes_back(tmp_path: Path, played: Round) -> None:
    facts = {"metrics": [{"round": 2, "loss": 0.1 + 0.2}], "name": "x"}
    write_checkpoint(tmp_path, played, facts)
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert equal(saved.round, played)
    assert saved.round.loss == played.loss
    assert saved.facts == facts
    assert not equal(saved.round, played._replace(t=3))
    control = {"control": {k: v + 1e-7 for k, v in played.server["control"].items()}}
    assert not equal(saved.round, played._replace(server=played.server | control))


def test_the_first_state_and_drop_outs(tmp_path: Path, setting: Setting) -> None:
    first = start(MAKE["fedavg"](setting), make_federation(setting.model))
    first = first._replace(dropped=(Dropped(2, 'said "no"'),))
    write_checkpoint(tmp_path, first, {})
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert equal(saved.round, first)
    assert saved.round.loss != saved.round.loss  # no loss before the first round


def test_the_last_two_checkpoints_stay(tmp_path: Path, played: Round) -> None:
    for t in (9, 10, 100, 101):
        write_checkpoint(tmp_path, played._replace(t=t), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-00000100", "round-00000101"]
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert saved.round.t == 101


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) is None
    assert read_checkpoint(tmp_path / "nowhere") is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "state cut": ("state.safetensors", cut),
    "state flipped": ("state.safetensors", flip),
    "state empty": ("state.safetensors", lambda p: p.write_bytes(b"")),
    "state gone": ("state.safetensors", Path.unlink),
    "about cut": ("round.json", cut),
    "about gone": ("round.json", Path.unlink),
    "about another": ("round.json", lambda p: p.write_text("[]")),
    "about without cohort": ("round.json", lambda p: p.write_text('{"format": 2}')),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "spoil"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_skipped(
    name: str, spoil: Any, tmp_path: Path, played: Round
) -> None:
    write_checkpoint(tmp_path, played, {"which": 1})
    newest = write_checkpoint(tmp_path, played._replace(t=3), {"which": 2})
    spoil(newest / name)
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert saved.facts == {"which": 1}
    spoil(tmp_path / "round-00000002" / name)
    with pytest.raises(DataError, match="round-00000003.*no other checkpoint is whole. Delete"):
        read_checkpoint(tmp_path)
    write_checkpoint(tmp_path, played._replace(t=3), {"which": 3})  # in the damaged one's place
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert saved.facts == {"which": 3}


def test_every_flipped_bit_of_the_facts_is_found(tmp_path: Path, played: Round) -> None:
    """`round.json` has measurements; a changed digit must not pass unnoticed."""
    about = write_checkpoint(tmp_path, played, {"metrics": [0.125, 0.25]}) / "round.json"
    whole = about.read_bytes()
    for place in range(0, len(whole), 3):
        spoilt = bytearray(whole)
        spoilt[place] ^= 1 << place % 7
        about.write_bytes(spoilt)
        with pytest.raises(DataError):
            read_checkpoint(tmp_path)


def test_a_half_written_checkpoint_is_ignored(tmp_path: Path, played: Round) -> None:
    whole = write_checkpoint(tmp_path, played, {})
    whole.rename(tmp_path / "round-00000007.part")
    assert read_checkpoint(tmp_path) is None
    write_checkpoint(tmp_path, played._replace(t=7), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-00000007"]


@pytest.mark.parametrize("other", [1, 3])
def test_another_format_is_not_guessed_at(other: int, tmp_path: Path, played: Round) -> None:
    about = write_checkpoint(tmp_path, played, {}) / "round.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"format": other}))
    with pytest.raises(DataError, match=f"format {other}, and this version of fedshift reads 2"):
        read_checkpoint(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path, played: Round) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file.round-00000002: cannot be written: File exists"):
        write_checkpoint(tmp_path / "file", played, {})


def test_facts_that_json_cannot_hold_leave_nothing(tmp_path: Path, played: Round) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_checkpoint(tmp_path, played, {"loss": float("nan")})
    assert read_checkpoint(tmp_path) is None


def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of what is written to disk from now on: files and folders by name, and renames."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def sync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        assert path.is_dir() or path.stat().st_size > 0  # not what is still in a buffer
        done.append(path.name)
        fsync(handle)

    def move(self: Path, target: Any) -> Path:
        done.append(f"{self.name} > {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr("os.fsync", sync)
    monkeypatch.setattr(Path, "rename", move)
    return done


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for names in /proc")
def test_content_is_on_disk_before_its_name(
    tmp_path: Path, played: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content is flushed before its name, or a power cut leaves names of empty files."""
    done = flushed(monkeypatch)
    write_checkpoint(tmp_path / "run" / "checkpoints" / "x", played, {})
    part = "round-00000002.part"
    first = ["state.safetensors", "round.json", part]
    assert done == [*first, f"{part} > round-00000002", "x", "checkpoints", "run"]


def test_older_checkpoints_stay_until_the_new_one_is_complete(
    tmp_path: Path, played: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up while one is written: the two older ones are left, and no partial file."""
    for t in (1, 2):
        write_checkpoint(tmp_path, played._replace(t=t), {"which": t})

    def full(self: Path, target: Any) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        with pytest.raises(InputError, match="round-00000003: cannot be written: No space left"):
            write_checkpoint(tmp_path, played._replace(t=3), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-00000001", "round-00000002"]
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert saved.facts == {"which": 2}


@pytest.mark.slow
def test_more_tensors_than_safetensors_reads(tmp_path: Path, played: Round) -> None:
    """safetensors allows headers of 100 MB; a checkpoint with one of 120 MB is still read."""
    named = {f"{k}" + "a" * 12_000_000: torch.full((2,), k) for k in range(10)}
    place = write_checkpoint(tmp_path, played._replace(server={"params": named}), {})
    with pytest.raises(SafetensorError, match="header too large"):
        safe_open(place / "state.safetensors", "pt").__enter__()
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert different({"params": named}, saved.round.server) == []


LIES = {
    "longer than the file": lambda h: (1 << 60).to_bytes(8, "little") + h[8:],
    "another type": lambda h: h.replace(b'"F32"', b'"F99"', 1),
    "a type of other size": lambda h: h.replace(b'"F32"', b'"F64"', 1),
    "a larger shape": lambda h: h.replace(b'"shape":[', b'"shape":[9', 1),
    "a negative shape": lambda h: h.replace(b'"shape":[10,8]', b'"shape":[-10,-8]', 1),
    "no offsets": lambda h: h.replace(b"data_offsets", b"data_ofsets_", 1),
    "offsets in the header": lambda h: re.sub(rb'offsets":\[0', b'offsets":[-9', h, count=1),
    "no JSON": lambda h: h[:8] + b"[" + h[9:],
    "a list": lambda h: h[:8] + b"[]".ljust(len(h) - 8),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_headers_that_lie(lie: Any, tmp_path: Path, played: Round) -> None:
    """Their checksums are right, so that only the check of the header can refuse them."""
    place = write_checkpoint(tmp_path, played, {})
    data = (place / "state.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    spoilt = lie(data[:end]) + data[end:]
    assert spoilt != data
    (place / "state.safetensors").write_bytes(spoilt)
    record = json.loads((place / "round.json").read_text())
    del record["checksum"]
    record["sha256"] = hashlib.sha256(spoilt).hexdigest()
    record["checksum"] = checkpoint._checksum(record)
    (place / "round.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"round-00000002: damaged \("):
        read_checkpoint(tmp_path)


def test_loaded_tensors_are_aligned_like_torchs(tmp_path: Path, played: Round) -> None:
    """Kernels may round unaligned memory differently, and safetensors' buffers start anywhere."""
    write_checkpoint(tmp_path, played, {})
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    parts = [saved.round.server, *saved.round.states.values()]
    assert all(v.data_ptr() % 64 == 0 for one in parts for v in flatten(one).values())


def test_an_unreadable_folder_is_an_error(
    tmp_path: Path, played: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a folder without checkpoints, or the run would begin anew."""
    write_checkpoint(tmp_path, played, {})

    def refused(self: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(DataError, match="cannot be looked into: Permission denied"):
        read_checkpoint(tmp_path)
