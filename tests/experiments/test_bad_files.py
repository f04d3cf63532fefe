"""Damaged or wrong files, as a table: message, exit code, and nothing is overwritten."""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import load_config
from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.folder.run_folder import EventLog, kept_in
from fedshift.experiments.task.preparing import prepare
from fedshift.files import append, write
from support.broken_inputs import COUNTS, GOOD, TARGET
from support.command_line import code_of
from support.dataset_fixtures import FILES, mnist
from support.report_fixtures import write_run
from support.small_runs import config_of, record_until

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
STATE = "o/checkpoints/run/round-00000002/state.safetensors"
ABOUT = "o/checkpoints/run/round-00000002/round.json"
Spoil = Callable[[Path], None]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def put(content: bytes) -> Spoil:
    return lambda path: path.write_bytes(content) and None


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def bloated(path: Path) -> None:
    """A header that claims 2^60 bytes."""
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def linked(path: Path) -> None:
    """A link to the file, which lies elsewhere."""
    path.rename(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


NESTED = b'{"a":' * 50_000
KINDS: dict[str, Spoil] = {
    "truncated": cut,
    "empty": put(b""),
    "another magic": put(PNG),
    "a pickle": put(pickle.dumps({"x": 1})),
    "a folder": folder_instead,
}


@dataclass(frozen=True)
class Target:
    """A file that a command reads: `args` are run in the folder that `make` has prepared."""

    file: str
    args: tuple[str, ...]
    code: int
    make: Callable[[Path], None]
    more: dict[str, Spoil]


def config(here: Path) -> None:
    (here / "f.toml").write_text(GOOD)


def tables(here: Path) -> None:
    (here / "counts.csv").write_text(COUNTS)
    (here / "target.csv").write_text(TARGET)


def digits(here: Path) -> None:
    (here / "f.toml").write_text('[data]\nname = "mnist"\n')
    mnist(here, "none", b"")


def whole(here: Path) -> None:
    write_run(here / "w")


def interrupted(here: Path) -> None:
    shutil.copytree(CUT[0], here / "o")


CUT: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def one_interrupted_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run of six rounds that died in its third, with one checkpoint left."""
    folder = tmp_path_factory.mktemp("runs") / "o"
    record_until(folder, config_of("fedavg"), 3)
    shutil.rmtree(folder / "checkpoints" / "run" / "round-00000001")
    CUT.append(folder)
    yield
    CUT.clear()


RESUME, DIAGNOSE = ("run", "--resume", "o"), ("diagnose", "--counts", "counts.csv", "--target",
                                              "target.csv")  # fmt: skip
NAME = 'name = "good"'
TARGETS = {
    "configuration": Target("f.toml", ("run", "f.toml", "--out", "out"), 2, config, {
        "nested": put(b"a = " + b"[" * 50_000),
        "a number of 5,000 digits": put(b"a = " + b"9" * 5000),
        "a path as name": put(GOOD.replace(NAME, 'name = "../../x"').encode()),
    }),
    "counts": Target("counts.csv", DIAGNOSE, 3, tables, {
        "a long cell": put(b"a,b\n1," + b"[" * 999_999),
    }),
    "target": Target("target.csv", DIAGNOSE, 3, tables, {}),
    "data set": Target(f"mnist/{FILES[0]}", ("run", "f.toml", "--out", "out"), 3, digits, {
        "terabytes": put(struct.pack(">IIII", 0x0803, 1 << 31, 1 << 10, 1 << 10)),
    }),
    "run folder": Target("w/summary.json", ("report", "w"), 3, whole, {"nested": put(NESTED)}),
    "metrics": Target("w/metrics.csv", ("report", "w"), 3, whole, {}),
    "lock": Target("o/lock.json", RESUME, 3, interrupted, {
        "nested": put(NESTED), "a list": put(b"[]"), "a link": linked,
    }),
    "checkpoint": Target(STATE, RESUME, 3, interrupted, {"bloated": bloated, "a link": linked}),
    "its facts": Target(ABOUT, RESUME, 3, interrupted, {"nested": put(NESTED), "a link": linked}),
    "events": Target("o/events.jsonl", RESUME, 3, interrupted, {"a link": linked}),
}  # fmt: skip
# An empty configuration is one: all defaults. Nobody reads the log of a run.
RIGHT = {("configuration", "empty"), *(("events", kind) for kind in KINDS)}
TABLE = [
    (name, kind)
    for name, target in TARGETS.items()
    for kind in KINDS | target.more
    if (name, kind) not in RIGHT
]


def files_of(folder: Path) -> dict[str, bytes | str]:
    """All files, links by where they point; without the log, to which a failure is added."""
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes()
        for p in folder.rglob("*")
        if p.is_symlink() or (p.is_file() and p.name != "events.jsonl")
    }


@pytest.fixture
def called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """(exit code, stderr) of a command in the temporary folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))

    def run(*args: str) -> tuple[int, str]:
        return code_of(monkeypatch, *args), capsys.readouterr().err

    return run


@pytest.mark.few(15)
@pytest.mark.parametrize(("name", "kind"), TABLE, ids=lambda v: str(v))
def test_bad_files(name: str, kind: str, called: Any, tmp_path: Path) -> None:
    target = TARGETS[name]
    target.make(tmp_path)
    (KINDS | target.more)[kind](tmp_path / target.file)
    before = files_of(tmp_path)
    code, err = called(*target.args)
    assert code == target.code, err
    line = err.rstrip().rpartition("error: ")[2]
    assert target.file.rpartition("/")[0].rpartition("/")[2] in line
    assert Path(target.file).name in line or "round-00000002" in line, err
    assert "Traceback" not in err
    assert "internal" not in err
    assert len(line) < 2000
    assert files_of(tmp_path) == before


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [n for n in TARGETS if n != "events"])
def test_files_that_may_not_be_read(
    name: str, called: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as another user, since tests may run as root, which ignores permissions."""
    target = TARGETS[name]
    target.make(tmp_path)
    real, odd = io.open, str(tmp_path / target.file)

    def refusing(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "r" in mode and os.path.abspath(str(path)) == odd:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, mode, *args, **kwargs)

    before = files_of(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("io.open", refusing)
        patched.setattr("builtins.open", refusing)
        code, err = called(*target.args)
    assert code == target.code, err
    assert "Permission denied" in err
    assert Path(target.file).name in err
    assert "internal" not in err
    assert files_of(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
def test_a_full_disk(
    after: int, called: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the n-th file on, also within a checkpoint; complete files stay."""
    config(tmp_path)
    flushed, real = [0], os.fsync

    def full(handle: int) -> None:
        flushed[0] += 1
        if flushed[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        code, err = called(
            "run", "f.toml", "--out", "o", "-c", "training.rounds=3", "-c", "training.steps=1",
            "-c", "model.name=linear", "--checkpoint-every", "1",
        )  # fmt: skip
    assert code == 2, err
    assert "cannot be written: No space left on device" in err
    left = [p.name for p in tmp_path.rglob("*")]
    assert not [name for name in left if name.endswith(".part")]
    assert "summary.json" not in left
    if "config.resolved.toml" in left:
        assert called("run", "--resume", "o")[0] == 0


def test_a_full_device() -> None:
    """The same with the kernel's error."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "w") as f, pytest.raises(OSError, match="No space left"):
        f.write("x" * 100_000)
    log = EventLog(Path("/dev"))
    object.__setattr__(log, "path", Path("/dev/full"))
    with pytest.raises(InputError, match=r"/dev/full: cannot be written: No space left on device"):
        log({"event": "x"})


def test_links_are_not_written_through(tmp_path: Path) -> None:
    """Neither at a file's own name nor at its temporary name."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("a.json", "a.json.part", "events.jsonl"):
        (tmp_path / name).symlink_to(precious)
    write(tmp_path / "a.json", "{}")
    assert not (tmp_path / "a.json").is_symlink()
    with pytest.raises(InputError, match=r"events.jsonl: cannot be written: a link to another pl"):
        append(tmp_path / "events.jsonl", "x")
    assert precious.read_text() == "mine"
    append(tmp_path / "new", "x")  # the control
    append(tmp_path / "new", "y")
    assert (tmp_path / "new").read_text() == "x\ny\n"


def test_many_unknown_keys_name_the_allowed_ones_once(tmp_path: Path) -> None:
    """A line for each key, on one page, as where the header of the next section is missing."""
    path = tmp_path / "e.toml"
    path.write_text('name = "e"\n[shift]\n' + "".join(f"key_{i} = 1\n" for i in range(20)))
    with pytest.raises(InputError) as refused:
        load_config(path)
    lines = [line for line in str(refused.value).splitlines() if "unknown key" in line]
    assert [line.partition('"')[2].partition('"')[0] for line in lines] == [
        f"shift.key_{i}" for i in range(20)
    ]
    assert ["allowed: " in line for line in lines] == [True] + [False] * 19
    assert all(str(path) in line for line in lines)
    assert len(str(refused.value)) < 5000


@pytest.mark.slow
def test_names_that_are_paths_stay_inside(tmp_path: Path) -> None:
    """A label becomes the name of a folder; a tensor's name never becomes one."""
    config = config_of("fedavg")
    prepared = prepare(config)
    keeper = kept_in(tmp_path / "o", config, prepared, 1)
    done = keeper.progress("../../x")
    assert done.after is None
    run_experiment(config, prepared=prepared, keeper=keeper)
    saved = keeper.progress(config.name)
    keeper.keep("../../x", saved)
    keeper.keep("..", saved)  # a configuration may be called that
    names = [p.name for p in (tmp_path / "o" / "checkpoints").iterdir()]
    assert sorted(names) == [".._.._x", "__", "run"]
    assert [p.name for p in (tmp_path / "o").iterdir()] == ["checkpoints"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o"]


def test_a_damaged_model_of_a_complete_run(tmp_path: Path) -> None:
    """The control of `stored`: a complete model is read, one with an infinity is refused."""
    import torch
    from safetensors.torch import save_file

    from fedshift.experiments.folder.model_file import read_parts

    path = tmp_path / "model.safetensors"
    save_file({"params/w": torch.ones(2)}, path)
    assert read_parts(path)["params"]["w"].tolist() == [1.0, 1.0]
    save_file({"params/w": torch.tensor([1.0, torch.inf])}, path)
    with pytest.raises(DataError, match=r'"params/w" holds numbers that no training leaves'):
        read_parts(path)
    bloated(path)
    with pytest.raises(DataError, match=r"model.safetensors: cannot be read: .*eader"):
        read_parts(path)
