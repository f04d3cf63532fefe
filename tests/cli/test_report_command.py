"""`fedshift report` for its users: sweeps, wrong folders, runs that are not over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedshift.cli import reporting
from support.command_line import calling
from support.report_fixtures import Outline, write_begun, write_run

Call = Callable[..., tuple[int, str, str]]


call = calling("report")


def inside(folder: str) -> list[str]:
    """FOLDER/* as a shell expands it."""
    return [str(path) for path in sorted(Path(folder).iterdir())]


def test_a_sweep_is_drawn_twice_with_the_same_page(call: Call) -> None:
    for seed in range(3):
        write_run(Path("sweep") / f"s{seed}", seed=seed)
    assert call(*inside("sweep")) == (0, "sweep/report.html\n", "")
    page = Path("sweep/report.html").read_bytes()
    assert "sweep/report.html" in inside("sweep")
    assert call(*inside("sweep")) == (0, "sweep/report.html\n", "")
    assert Path("sweep/report.html").read_bytes() == page
    assert call("sweep") == (0, "sweep/report.html\n", "")
    assert Path("sweep/report.html").read_bytes() == page
    assert Outline(page.decode()).row("FedPALS", "3")
    # Control: another run changes it.
    write_run(Path("sweep") / "s3", seed=3)
    call(*inside("sweep"))
    assert Path("sweep/report.html").read_bytes() != page


def test_what_is_no_run_is_left_out_with_a_note(call: Call) -> None:
    write_run(Path("sweep/a"))
    Path("sweep/logs").mkdir()
    Path("sweep/notes.txt").write_text("")
    code, _, err = call(*inside("sweep"))
    assert (code, err) == (0, "note: no run folder, so left out: sweep/logs, sweep/notes.txt\n")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["gone"], 3, "no run folder gone; `fedshift run FILE.toml` makes one"),
        (["mlruns"], 3, "mlruns: no run folder; give one that `fedshift run`, `fedshift compare`"),
        (["empty", "f.txt"], 3, "empty: no run folder; give one that"),
        (["foreign"], 3, "beside it, this is no run folder of fedshift: leave it out"),
        (["later"], 3, "fedshift 999.1 wrote it, and this is 0.1.0: pip install -U fedshift"),
        (["damaged"], 3, "the file is damaged or from another version: run the experiment again"),
        (["begun", "--figures", "f"], 2, "--figures needs a complete run, and none of these is"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(
    call: Call, args: list[str], code: int, words: str
) -> None:
    for name in ("empty", "mlruns/0", "foreign"):
        Path(name).mkdir(parents=True)
    Path("f.txt").write_text("")
    Path("foreign/summary.json").write_text('{"loss": 0.5}')
    later, damaged = write_run(Path("later")), write_run(Path("damaged"))
    text = (later / "summary.json").read_text()
    edited = text.replace('"0.0.9"', '"999.1"').replace('"why"', '"because"')
    (later / "summary.json").write_text(edited)
    (damaged / "summary.json").write_text(text[:100])
    write_begun(Path("begun"), 2)
    given, out, err = call(*args)
    assert (given, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_later_version_is_drawn_where_it_can_be_read(call: Call) -> None:
    folder = write_run(Path("later"))
    text = (folder / "summary.json").read_text().replace('"0.0.9"', '"999.1", "new": [1]')
    (folder / "summary.json").write_text(text)
    assert call("later")[0] == 0


def test_a_run_that_is_going_on_is_drawn(call: Call) -> None:
    write_begun(Path("sweep/a"), 4)
    write_run(Path("sweep/b"), seed=1)
    assert call("sweep")[0] == 0
    text = "".join(Outline(Path("sweep/report.html").read_text()).text)
    assert "not complete, round 4 of 9: it is still going on, or was killed." in text


def test_the_title_is_the_comparison_s(call: Call) -> None:
    for seed in range(2):
        write_run(Path("cmp/runs") / f"fedpals_s{seed}", seed=seed)
    Path("cmp/results.json").write_text(json.dumps({"title": "hospitals", "runs": []}))
    assert call("cmp")[1] == "cmp/report.html\n"
    assert "<h1>hospitals</h1>" in Path("cmp/report.html").read_text()


def test_progress_is_shown_where_reading_takes_long(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        write_run(Path(name))
    assert call("a", "b", "c")[2] == ""
    monkeypatch.setattr(reporting, "BETWEEN", -1.0)
    assert "read 2 of 3 run folders\n" in call("a", "b", "c")[2]


def test_the_command_on_the_page_names_file_and_backend(call: Call) -> None:
    folder = write_run(Path("a b"), seed=2)
    (folder / "lock.json").write_text(json.dumps({"format": 1, "backend": "dense in 4 workers"}))
    call("a b")
    text = "".join(Outline((folder / "report.html").read_text()).text)
    assert "fedshift run 'a b/config.resolved.toml' --backend dense --workers 4" in text
    (folder / "fit.json").write_text(json.dumps({"call": 'task, Net, method="fedavg"'}))
    call("a b")
    text = "".join(Outline((folder / "report.html").read_text()).text)
    assert 'fs.fit(task, Net, method="fedavg", seed=2, backend="dense", workers=4)' in text
