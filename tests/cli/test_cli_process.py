"""The installed script as a process: signals, pipes, encodings; and how its text fits a width."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedshift.cli.console import LiveProgress, PlainProgress, show_table
from fedshift.cli.diagnosis import diagnose_files
from fedshift.errors import InputError
from fedshift.files import write
from support.broken_inputs import COUNTS, GOOD, TARGET
from support.command_line import calling
from support.federations import hears_ctrl_c

SCRIPT = Path(sys.executable).with_name("fedshift")
Call = Callable[..., tuple[int, str, str]]
ENV = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"OMP_NUM_THREADS": "1"}
LONG = ["-c", "training.rounds=100000", "-c", "model.name=linear"]


def ran(folder: Path, *args: str, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [SCRIPT, *args], cwd=folder, capture_output=True, text=True, check=False, env=ENV | env
    )
    return done.returncode, done.stdout, done.stderr


# What does not depend on the process itself runs in this one.
here = calling()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_demo_in_order(number: int, code: int, tmp_path: Path) -> None:
    """For its effect on a run see tests/experiments/test_resume.py."""
    args, place = ["demo", "--out", "o", *LONG], Path("o/fedavg")
    with subprocess.Popen(
        [SCRIPT, *args], cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, preexec_fn=hears_ctrl_c
    ) as job:
        for _ in range(600):
            if (tmp_path / place / "events.jsonl").exists():
                break
            time.sleep(0.05)
        job.send_signal(number)
        err = job.communicate(timeout=120)[1].decode()
    assert job.returncode == code
    again = f"`fedshift run --resume {place}` goes on from here"
    assert err.splitlines()[-1] == f"interrupted; {again}"
    assert "Traceback" not in err
    left = {path.name for path in (tmp_path / place).iterdir()}
    assert left == {"config.resolved.toml", "lock.json", "events.jsonl", "checkpoints"}
    assert json.loads((tmp_path / place / "lock.json").read_text())["data"] == "fashion-mnist-mini"
    last = json.loads((tmp_path / place / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["error"]) == ("failed", "interrupted")


@pytest.mark.slow
def test_terminating_a_table_ends_its_processes(tmp_path: Path) -> None:
    args = ["reproduce", "fedpals/table1", "--dataset", "fashion-mnist-mini", "--jobs", "2",
            "--seeds", "0", "--methods", "fedavg,fedprox", "-c", "model.name=linear"]  # fmt: skip
    runs = tmp_path / "reproduced" / "runs"
    with subprocess.Popen(
        [SCRIPT, *args, "--rounds", "100000"], cwd=tmp_path, env=ENV, stderr=subprocess.PIPE
    ) as job:
        for _ in range(1200):
            if len(list(runs.glob("*/events.jsonl"))) == 2:
                break
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        err = job.communicate(timeout=60)[1].decode()
    assert job.returncode == 143
    assert err.splitlines()[-1] == "interrupted; the same command goes on from here"
    assert "Traceback" not in err
    left = {path: path.read_bytes() for path in runs.glob("*/events.jsonl")}
    time.sleep(0.3)
    assert {path: path.read_bytes() for path in left} == left  # no process writes any more
    assert "not in the paper" in (tmp_path / "reproduced" / "table1" / "table.md").read_text()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("module", "number", "code"),
    [("typer", signal.SIGINT, 130), ("torch", signal.SIGINT, 130), ("torch", signal.SIGTERM, 143)],
)
def test_an_interruption_while_libraries_load(
    module: str, number: int, code: int, tmp_path: Path
) -> None:
    """No traceback: the first imports are guarded, and torch is not unwound."""
    stop = f"import os\nos.kill(os.getpid(), {int(number)})\nraise SystemExit('came too far')\n"
    (tmp_path / f"{module}.py").write_text(stop)
    path = {"PYTHONPATH": str(tmp_path)}
    assert ran(tmp_path, "methods", **path) == (code, "", "interrupted\n")
    result = ran(tmp_path, "methods", "--format", "json", **path)
    assert result[:2] == (code, "")
    assert json.loads(result[2]) == {"error": "interrupted", "exit_code": code}


@pytest.mark.slow
def test_a_library_that_fails_to_load_is_no_interruption(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('stopped')\n")
    code, _, err = ran(tmp_path, "methods", PYTHONPATH=str(tmp_path), TMPDIR=str(tmp_path))
    assert code == 70
    assert "ImportError: stopped" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [(["rum"], "No such command 'rum'. Did you mean 'run'?"),
     (["datasets", "fech"], "No such command 'fech'. Did you mean 'fetch'?"),
     (["nothing"], "No such command 'nothing'.")],
)  # fmt: skip
def test_the_nearest_match_is_named_once(args: list[str], message: str, here: Call) -> None:
    assert here(*args)[2].splitlines()[-1] == f"Error: {message}"
    assert json.loads(here(*args, "--format", "json")[2])["error"] == message


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        pytest.param(["methods"], marks=pytest.mark.slow),
        pytest.param(["methods", "--format", "json"], marks=pytest.mark.slow),
        ["--help"],
    ],
)
def test_a_closed_pipe_is_no_failure(args: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [SCRIPT, *args], stdout=writer, stderr=subprocess.PIPE, check=False, env=ENV
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_a_full_device_is_named(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [SCRIPT, "methods"], stdout=full, stderr=subprocess.PIPE, check=False, env=ENV
        )
    assert done.returncode == 2
    message = b"error: the output cannot be written: No space left on device; send it elsewhere\n"
    assert done.stderr == message


@pytest.mark.slow
def test_ascii_output(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(GOOD)
    code, out, err = ran(tmp_path, "run", "f.toml", PYTHONIOENCODING="ascii")
    assert code == 0, err
    assert "FedAvg" in out
    assert out.isascii()


def test_version_and_help(tmp_path: Path) -> None:
    assert ran(tmp_path, "--version")[:2] == (0, "fedshift 0.1.0\n")
    assert "3 missing or damaged data (also CSV" in " ".join(ran(tmp_path, "--help")[1].split())
    for command, text in (
        (["run"], "FILE.toml: the experiment's data"),
        (["report"], "FOLDER...: run folders"),
        (["datasets", "fetch"], "NAME: as listed by"),
        (["init"], "-c sets keys of section"),
    ):
        assert text in ran(tmp_path, *command, "--help")[1]


@pytest.mark.parametrize(
    "args",
    [
        ["rum"],
        pytest.param(["run"], marks=pytest.mark.slow),
        ["demo", "--fast"],
        ["diagnose", "--lam", "x"],
        ["run", "a", "b"],
    ],
)
def test_usage_errors_as_json(args: list[str], tmp_path: Path) -> None:
    code, out, err = ran(tmp_path, *args, "--format", "json")
    answer = json.loads(err)
    assert (code, out, answer["exit_code"]) == (2, "", 2)
    assert answer["error"]


@pytest.mark.slow
def test_a_lost_data_folder_is_named(
    here: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = "warning: $FEDSHIFT_DATA: no such folder: /nonexistent\n"
    for folder, warning in (("/nonexistent", line), (str(tmp_path), "")):
        monkeypatch.setenv("FEDSHIFT_DATA", folder)
        assert here("datasets")[::2] == (0, warning)


@pytest.mark.slow
def test_a_used_folder_is_refused_before_data_are_loaded(
    here: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "f.toml").write_text(GOOD.replace("fashion-mnist-mini", "mnist"))
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine").touch()
    for args in (["run", "f.toml"], ["demo", "-c", "data.name=mnist"]):
        code, _, err = here(*args, "--out", "o")
        assert code == 2
        assert err == "error: o: exists and is not an empty folder; give another --out\n"


@pytest.mark.slow
def test_a_page_replaces_only_pages(here: Call, tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text(COUNTS)
    (tmp_path / "t.csv").write_text(TARGET)
    (tmp_path / "notes.html").write_text("my notes")
    for command in (["diagnose", "--counts", "c.csv", "--target", "t.csv", "--report"],
                    ["report", "nowhere", "--out"]):  # fmt: skip
        for name, why in (
            ("c.csv", "the report is an HTML page; give it a name that ends in .html"),
            ("notes.html", "exists and is not an HTML page; give another name"),
        ):
            code, _, err = here(*command, name)
            assert (code, err) == (2, f"error: {name}: {why}\n")
    assert (tmp_path / "c.csv").read_text() == COUNTS
    assert (tmp_path / "notes.html").read_text() == "my notes"
    args = ("--counts", "c.csv", "--target", "t.csv", "--report", "p.html")
    assert [here("diagnose", *args)[0] for _ in range(2)] == [0, 0]


def test_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(InputError, match=r"a: cannot be written: Read-only file system"):
        write(tmp_path / "a", "text")


EVENTS: list[dict[str, Any]] = [
    {"event": "start", "run": "fedpals ess=50%", "rounds": 1},
    {"event": "round", "run": "fedpals ess=50%", "round": 1, "rounds": 1},
    {"event": "evaluation", "run": "fedpals ess=50%", "round": 1, "train_loss": 0.5,
     "target_accuracy": 0.812, "estimated_accuracy": 0.8},
]  # fmt: skip
SCORES = "loss 0.500 target 81.2% est. 80.0%"


def test_plain_progress(capsys: pytest.CaptureFixture[str]) -> None:
    listen = PlainProgress()
    for event in EVENTS:
        listen(event)
    lines = capsys.readouterr().err
    assert lines == f"fedpals ess=50%: 1 round\nfedpals ess=50%: done  {SCORES}\n"


def test_a_bar_fits_eighty_columns() -> None:
    screen = io.StringIO()
    live = LiveProgress(Console(file=screen, width=80, force_terminal=True, color_system=None))
    with live.bars:
        for event in EVENTS:
            live(event)
    line = next(one for one in reversed(screen.getvalue().splitlines()) if "fedpals" in one)
    assert "fedpals ess=50%" in line
    assert SCORES in line


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80])
def test_text_fits_the_width(
    columns: int, capsys: pytest.CaptureFixture[str], here: Call, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [f"column {i}" for i in range(7)]
    show_table("T", names, [["estimate *, validation, oracle (cheating)"] * 7])
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= columns
    (tmp_path / "c.csv").write_text(COUNTS)
    (tmp_path / "t.csv").write_text(TARGET)
    diagnose_files(
        tmp_path / "c.csv", tmp_path / "t.csv", lam=None, ess=None, cap=None, normalise=False,
        bootstrap=0, page=None, as_json=False,
    )  # fmt: skip
    verdict = capsys.readouterr().out.partition("┏")[0].splitlines()
    assert max(map(len, verdict)) <= columns
    _, out, _ = here("methods")
    assert max(map(len, out.splitlines())) <= columns
