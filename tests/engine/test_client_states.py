"""Clients' states on disk: the same rounds bit for bit, and no file is left behind."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedshift.engine.processes.pool import workers
from fedshift.engine.run import Round, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.engine.storage.client_states import OnDisk, Shelf, StoredStates, in_memory
from fedshift.engine.storage.tensor_file import map_tensors, write_tensors
from fedshift.errors import InputError
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.progress import STATES, shelf_in
from fedshift.experiments.folder.run_folder import kept_in
from fedshift.experiments.task.preparing import prepare
from fedshift.recipes import Setting
from fedshift.tree import size_in_bytes
from support.every_method import MAKE
from support.federations import make_federation
from support.fuzz import different
from support.rounds import everything
from support.small_runs import Killed, config_of, results

pytestmark = pytest.mark.routed

ROUNDS = 3


def on_disk(played: Round) -> list[int]:
    assert isinstance(played.states, StoredStates)
    return [i for i, entry in played.states.entries.items() if isinstance(entry, OnDisk)]


def both(name: str, setting: Setting, shelf: Shelf) -> tuple[Round, Round]:
    """The last rounds of two runs, with states in memory and on disk."""
    algorithm, federation = MAKE[name](setting), make_federation(setting.model)
    plain = list(run(algorithm, federation, ROUNDS, cohort=4))[-1]
    return plain, list(run(algorithm, replace(federation, shelf=shelf), ROUNDS, cohort=4))[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["scaffold", "ditto", "feddyn", "fedrep", "fedala", "feddisk"])
def test_the_rounds_are_the_same(name: str, setting: Setting, tmp_path: Path) -> None:
    plain, shelved = both(name, setting, Shelf(0, tmp_path))
    assert list(shelved.states) == list(plain.states)
    assert different(everything(plain), everything(shelved)) == []
    assert bool(on_disk(shelved)) == bool(in_memory(plain.states))
    assert in_memory(shelved.states) == 0


def test_the_comparison_can_fail(setting: Setting, tmp_path: Path) -> None:
    plain, shelved = both("scaffold", setting, Shelf(0, tmp_path))
    assert isinstance(shelved.states, StoredStates)
    one = next(entry for entry in shelved.states.entries.values() if isinstance(entry, OnDisk))
    data = bytearray(one.path.read_bytes())
    data[one.places[0].start] ^= 1
    one.path.write_bytes(data)
    assert different(everything(plain), everything(shelved)) != []


def test_states_within_the_budget_stay_in_memory(setting: Setting, tmp_path: Path) -> None:
    plain, _ = both("scaffold", setting, Shelf())
    each = size_in_bytes(next(iter(plain.states.values())))
    there = replace(make_federation(setting.model), shelf=Shelf(2.5 * each, tmp_path))
    rounds = list(run(MAKE["scaffold"](setting), there, ROUNDS, cohort=4))
    assert different(everything(plain), everything(rounds[-1])) == []
    # Of round 1's four two; later fewer may be left, as those before count until a round is over.
    assert [in_memory(rounds[0].states), len(on_disk(rounds[0]))] == [2 * each, 2]
    assert max(in_memory(played.states) for played in rounds) == 2 * each


@pytest.mark.slow
def test_workers_and_stacked_clients(setting: Setting, tmp_path: Path) -> None:
    algorithm = MAKE["scaffold"](setting)
    federation = make_federation(setting.model)
    shelved = replace(federation, shelf=Shelf(0, tmp_path))
    plain = list(run(algorithm, federation, ROUNDS, cohort=4))[-1]
    with workers(federation.clients, 2) as team:
        together = list(run(algorithm, shelved, ROUNDS, cohort=4, backend=team))[-1]
    assert different(everything(plain), everything(together)) == []
    plain = list(run(algorithm, federation, ROUNDS, cohort=4, backend=Stacked()))[-1]
    stacked = list(run(algorithm, shelved, ROUNDS, cohort=4, backend=Stacked()))[-1]
    assert different(everything(plain), everything(stacked)) == []


@pytest.mark.slow
def test_files_are_deleted_with_the_last_round_that_uses_them(
    setting: Setting, tmp_path: Path
) -> None:
    federation = replace(make_federation(setting.model), shelf=Shelf(0, tmp_path / "states"))
    rounds = list(run(MAKE["scaffold"](setting), federation, 2))
    before = {i: {p: dict(t) for p, t in s.items()} for i, s in rounds[0].states.items()}
    assert len(list((tmp_path / "states").iterdir())) == 2 * len(federation.clients)
    del rounds[1]
    gc.collect()
    assert len(list((tmp_path / "states").iterdir())) == len(federation.clients)
    first = [{f"{i} {p}": t for i, s in states.items() for p, t in s.items()}
             for states in (before, rounds[0].states)]  # fmt: skip
    assert different(*first) == []
    rounds.clear()
    gc.collect()
    assert list((tmp_path / "states").iterdir()) == []
    assert float(before[0]["control"]["head.bias"].sum()) is not None  # still mapped


def test_a_folder_that_cannot_be_written(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file: a client's state cannot be written: File exists"):
        both("scaffold", setting, Shelf(0, tmp_path / "file"))
    with pytest.raises(InputError, match="-1 bytes for clients' states; give 0 or more"):
        Shelf(-1)


def test_any_tensor_comes_back(tmp_path: Path) -> None:
    """Also when the file is read by safetensors, apart from the padding between tensors."""
    named = {
        "a/odd": torch.arange(7, dtype=torch.uint8),
        "a/none": torch.zeros(0, 4),
        "b/scalar": torch.tensor(3.5, dtype=torch.float64),
        "b/half": torch.randn(3, 5).bfloat16(),
        "b/turned": torch.randn(4, 6).T,
        "b/truth": torch.tensor([True, False]),
        "b/count": torch.tensor(2**40),
        "b/pixel": torch.tensor([65535], dtype=torch.uint16),
    }
    places = write_tensors(tmp_path / "x", named.items).places
    assert all(p.start % 64 == 0 for p in places)
    mapped, read = map_tensors(tmp_path / "x", places), load_file(tmp_path / "x")
    assert sorted(k for k in read if not k.startswith("~pad.")) == sorted(named)
    for k, v in named.items():
        for other in (mapped[k], read[k]):
            assert (other.dtype, other.shape) == (v.dtype, v.shape)
            assert torch.equal(other, v)
    with pytest.raises(
        InputError, match='"x" is torch.complex128, which a safetensors file cannot'
    ):
        write_tensors(tmp_path / "x", {"x": torch.zeros(1, dtype=torch.complex128)}.items)


def recorded(folder: Path, name: str, mebibytes: float | None, at: int | None = None) -> list[str]:
    """Record a run with its states on disk until round `at`; return the folder's earlier files."""
    config, seen = config_of(name), list[str]()
    prepared = prepare(config)

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == (at or ROUNDS):
            seen.extend(p.suffix for p in (folder / STATES).rglob("*"))
            if at is not None:
                raise Killed

    folder.mkdir(exist_ok=True)
    with contextlib.suppress(Killed), shelf_in(folder, mebibytes) as shelf:
        keeper = replace(kept_in(folder, config, prepared, 1), shelf=shelf)
        record(folder, config, prepared, listen, keeper=keeper)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "ditto"])
def test_killed_and_resumed_with_states_on_disk(name: str, tmp_path: Path) -> None:
    """The files equal those of a run in memory; the resumed half may have another memory budget."""
    assert recorded(tmp_path / "whole", name, None) == []
    assert ".safetensors" in recorded(tmp_path / "cut", name, 0, at=3)
    (tmp_path / "cut" / STATES).mkdir()
    (tmp_path / "cut" / STATES / "left by kill -9").write_text("")
    assert ".safetensors" in recorded(tmp_path / "cut", name, 0)
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


def test_a_negative_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--state-memory -3: give MiB"), shelf_in(tmp_path, -3):
        pass
