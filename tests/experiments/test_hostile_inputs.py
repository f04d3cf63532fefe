"""Hostile inputs: each ends with a message that says what to do."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedshift.cli.ending import out_of_resources
from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import MOST, MOST_SHOWN, load_config, validate
from fedshift.experiments.config.schema import Config
from fedshift.experiments.engines import processes
from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.resume import check_names, configured
from fedshift.record.folder import CHECKPOINTS, CONFIG, SUMMARY
from support.broken_inputs import GOOD


def written(folder: Path, content: bytes) -> Path:
    path = folder / "f.toml"
    path.write_bytes(content)
    return path


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    plain = load_config(written(tmp_path, GOOD.encode()))
    assert load_config(written(tmp_path, b"\xef\xbb\xbf" + GOOD.encode())) == plain


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD.encode("utf-16"), r"f.toml: not UTF-8 text \(invalid start byte at byte 0\)"),
        (GOOD.encode() + b"#" * MOST, "f.toml: longer than 1,000,000 bytes"),
        (b".".join([b"a"] * 4000) + b" = 1", "f.toml: tables within tables"),
        (b"x = " + b"[" * 5000, "f.toml: no configuration: maximum recursion"),
    ],
    ids=["utf-16", "long", "deep key", "deep list"],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(written(tmp_path, content))


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000], ids=["digits", "brackets"])
def test_overrides_that_cannot_be_read(tmp_path: Path, value: str) -> None:
    with pytest.raises(InputError, match="-c training.rounds: the value cannot be read"):
        load_config(written(tmp_path, GOOD.encode()), [f"training.rounds={value}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.rounds=true"], "^-c training.rounds = true: must be a whole"),
        (["model.hidden=[3, -1]"], r"^-c model.hidden: model.hidden.1 = -1: must be at least 1"),
        (["foo.bar.baz=1"], 'f.toml with -c foo.bar.baz: unknown key "foo"'),
        (
            ["method.name=fedprox", "method.mu=-1", "training.rounds=2"],
            "^-c method.mu must be 0 or more, got -1",
        ),
        (["training.rounds=2", "trainin.lr=1"], 'f.toml with -c trainin.lr: unknown key "tr'),
    ],
)
def test_overrides_are_not_blamed_on_the_file(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        load_config(written(tmp_path, GOOD.encode()), overrides)


def test_of_many_mistakes_the_first_are_listed() -> None:
    with pytest.raises(InputError, match="and 5 more$") as caught:
        validate({f"k{i}": 1 for i in range(MOST_SHOWN + 5)})
    assert len(str(caught.value).splitlines()) == MOST_SHOWN + 1


@pytest.mark.parametrize("name", [".", "..", ". ."])
def test_a_name_of_dots_is_another_folder(name: str) -> None:
    with pytest.raises(InputError, match="not only dots and spaces"):
        validate({"name": name})
    assert validate({"name": f"{name}x"}).name == f"{name}x"  # the control


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"threads": 100_000}, "must be at most 1024"),
        ({"batch": 10**20}, "must be at most 9007199254740992"),
    ],
)
def test_numbers_beyond_any_machine(training: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate({"training": training})


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"training": {"min_clients": 10, "on_bad_reply": "drop"}}, "9 clients, so that all would"),
        ({"method": {"name": "krum", "byzantine": 4}}, "9 clients' changes are too few"),
        ({"shift": {"target": [float("inf")] + [0.0] * 9, "normalise_target": True}}, r"\[0\]=inf"),
    ],
)
def test_what_no_round_can_fulfil_is_refused_before_the_first(
    tables: dict[str, Any], message: str
) -> None:
    events: list[Any] = []
    with pytest.raises(InputError, match=message):
        run_experiment(validate(tables), listen=events.append)
    assert not events


def test_no_more_processes_than_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    class EnoughError(Exception):
        pass

    def workers(clients: Any, count: int, **limits: Any) -> Any:
        counts.append(count)
        raise EnoughError

    monkeypatch.setattr("fedshift.experiments.engines.workers", workers)
    for training in ({}, {"cohort": 3}):
        config = validate({"model": {"name": "linear"}, "training": training})
        with pytest.raises(EnoughError):
            run_experiment(config, engine=processes(1000))
    assert counts == [9, 3]


def begun(folder: Path, name: str = "run") -> Path:
    (folder / CHECKPOINTS / name / "round-00000001").mkdir(parents=True)
    (folder / CONFIG).write_text(GOOD)
    return folder


def test_a_damaged_summary_costs_no_checkpoint(tmp_path: Path) -> None:
    (begun(tmp_path) / SUMMARY).write_text("{")
    with pytest.raises(DataError, match=r"summary.json: damaged"):
        configured(tmp_path)
    assert (tmp_path / CHECKPOINTS / "run").is_dir()
    (tmp_path / SUMMARY).write_text("{}")  # the control: a run killed at its very end
    with pytest.raises(InputError, match="this run is complete"):
        configured(tmp_path)
    assert not (tmp_path / CHECKPOINTS).exists()


def test_a_damaged_configuration_of_a_run(tmp_path: Path) -> None:
    (begun(tmp_path) / CONFIG).write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"config.resolved.toml: not UTF-8 text"):
        configured(tmp_path)


def test_an_emptied_configuration_does_not_begin_another_run(tmp_path: Path) -> None:
    """An empty file is a configuration: the default one, under the default name."""
    begun(tmp_path, "mine")
    with pytest.raises(DataError, match=r"config.resolved.toml: does not belong to .*mine"):
        check_names(tmp_path, Config().name)
    check_names(tmp_path, "mine")
    shutil.move(tmp_path / CHECKPOINTS / "mine", tmp_path / CHECKPOINTS / "mine_ess=50_")
    check_names(tmp_path, "mine")  # a candidate's


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "not enough memory; take a smaller"),
        (
            RuntimeError("can't allocate memory: you tried to allocate 8000 bytes"),
            "not enough memory for 8,000 bytes",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "no more: Too many open files; ask for"),
    ],
)
def test_what_the_machine_lacks_is_no_defect(error: Exception, message: str) -> None:
    refusal = out_of_resources(error)
    assert isinstance(refusal, InputError)
    assert message in str(refusal)


def test_other_failures_are_defects() -> None:
    assert out_of_resources(RuntimeError("shapes differ")) is None
    assert out_of_resources(OSError(errno.EISDIR, "Is a directory")) is None
