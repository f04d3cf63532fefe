"""Names of clients and labels are printed, never interpreted: by terminals, rich or browsers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fedshift.cli.app import app
from fedshift.cli.console import LiveProgress, show_table
from fedshift.cli.ending import perform
from fedshift.diagnose import diagnose
from fedshift.errors import InputError, TrainingError, visible
from fedshift.report.shapes import escape
from fedshift.report.tables import Table, csv_text, latex, markdown
from support.image_fixtures import count_as_whole, write_wildcam

# A red screen with a title, a way back to its start, writing from right to left, and no width.
NAME = "\x1b[2J\x1b]0;owned\x07\r\u202efox\u200b\x9b31m"
SEEN = r"\x1b[2J\x1b]0;owned\x07\r\u202efox\u200b\x9b31m"
# What rich and HTML would obey.
MARKED = "[red]cat[/] :dog: [link=x]<b>&"

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def command(*args: str) -> tuple[int, str, str]:
        code = perform(app, args)
        return code, *capsys.readouterr()

    return command


def harmless(text: str) -> bool:
    """Whether a text has no control characters but ends of lines."""
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_what_a_terminal_obeys_is_made_visible() -> None:
    assert visible(NAME) == SEEN
    assert visible("a\nb\tc", keep="\n") == "a\nb\\tc"
    assert visible("\ud800\ufeff\u2028\u2066\x00") == r"\ud800\ufeff\u2028\u2066\x00"
    for plain in ("", "Zürich 北京 ﻝﻝ", "no\xa0break", "e\u0301", r"\x1b", "🦊"):
        assert visible(plain) == plain


@pytest.mark.parametrize("kind", [InputError, TrainingError])
def test_messages_are_harmless_in_python_as_well(kind: type[Exception]) -> None:
    assert str(kind(f'client "{NAME}"\nand more')) == f'client "{SEEN}"\nand more'
    with pytest.raises(InputError, match=r'names must differ; "a\\nb" is given 2 times') as caught:
        diagnose([[1, 2], [3, 4]], [0.5, 0.5], clients=["a\nb", "a\nb"])
    assert "\n" not in str(caught.value)


def table(path: Path, rows: list[list[str]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def test_diagnose_prints_names_as_they_are(cli: Cli, tmp_path: Path) -> None:
    labels = [NAME, MARKED, "two\nlines"]
    rows = [["client", *labels], ["a" + NAME, "3", "0", "0"], ["b" + MARKED, "0", "3", "0"]]
    counts = table(tmp_path / "counts.csv", rows)
    target = table(tmp_path / "target.csv", [labels, ["0.4", "0.4", "0.2"]])
    code, out, err = cli(
        "diagnose", "--counts", counts, "--target", target, "--report", "page.html"
    )
    assert code == 0
    page = Path("page.html").read_text()
    for text in (out, err, page):
        assert harmless(text)
    assert f"a{SEEN}" in out
    assert f"b{MARKED}" in out
    assert r"two\nlines" in out
    assert r'no client holds "two\nlines"' in err
    assert f"a{SEEN}" in page
    assert "b[red]cat[/] :dog: [link=x]&lt;b&gt;&amp;" in page
    assert "<b>" not in page
    wrong = table(tmp_path / "wrong.csv", [rows[0], ["a" + NAME, "3", "0", NAME]])
    code, out, err = cli("diagnose", "--counts", wrong, "--target", target)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert harmless(err)
    assert rf'("two\nlines"): "{SEEN}" is not a number' in err


@pytest.mark.slow
def test_a_run_and_its_report_print_names_as_they_are(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cameras = (9, 5, 4, 3, 2, 2)
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    count_as_whole(monkeypatch, cameras)
    names = write_wildcam(tmp_path / "iwildcam_v2.0", cameras) / "categories.csv"
    text = names.read_text().replace("animal 0", MARKED).replace("animal 1", f'"{NAME}"')
    names.write_text(text, newline="")
    Path("f.toml").write_text(
        '[data]\nname = "iwildcam"\nvalidation = 0.0\n[shift]\nkind = "natural"\nclients = 2\n'
        '[model]\nname = "linear"\n[training]\nrounds = 1\nlr = 0.01\n'
    )
    code, out, err = cli("run", "f.toml", "--out", "o")
    assert code == 0, err
    again, printed, _ = cli("report", "o", "--out", "again.html")
    assert again == 0
    pages = [Path(p).read_text() for p in ("o/report.html", "again.html")]
    for shown in (out, err, printed, *pages, Path("o/clients.csv").read_text()):
        assert harmless(shown)
    assert all(SEEN in page for page in pages)
    assert "[red]cat[/] :dog: [link=x]&lt;b&gt;&amp;" in pages[0]
    assert not any("<b>" in page for page in pages)
    assert f"label_{SEEN}" in next(csv.reader(io.StringIO(Path("o/clients.csv").read_text())))


def test_mistakes_in_files_and_options_are_one_line(cli: Cli) -> None:
    Path("f.toml").write_text('"\\u001b[31m\\n\\u202e" = 1\n[data]\nname = "\\u001b[2J[red]\\n"\n')
    code, out, err = cli("run", "f.toml")
    assert (code, out) == (2, "")
    assert harmless(err)
    assert err.count("\n") == 2
    assert r'f.toml:1: unknown key "\x1b[31m\n\u202e"' in err
    assert r'f.toml:3: data.name: unknown data set "\x1b[2J[red]\n"' in err
    for args in (("run", NAME), ("run", f"--{NAME}"), (NAME,), ("datasets", "fetch", NAME)):
        code, out, err = cli(*args)
        assert code == 2
        assert harmless(out + err)


def test_bars_and_tables_draw_names_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    drawn = io.StringIO()
    bars = LiveProgress(Console(file=drawn, force_terminal=True, width=200))
    with bars.bars:
        for run in (NAME, MARKED):
            bars({"event": "start", "run": run, "rounds": 2})
    assert SEEN in drawn.getvalue()
    assert MARKED in drawn.getvalue()
    assert not any(
        piece in drawn.getvalue() for piece in ("\x1b[2J\x1b]", "\x07", "\u202e", "\x9b")
    )
    show_table(f"title {MARKED}", (MARKED, NAME), [(NAME, MARKED)])
    out = capsys.readouterr().out
    assert harmless(out)
    assert out.count(MARKED) == 3
    assert out.count(SEEN) == 2


def test_every_form_of_a_report_shows_names_as_they_are() -> None:
    rows = Table(("name", "n"), ((NAME, 1), (MARKED, 2)), ("", "d"), caption=NAME)
    for form in (csv_text, latex, markdown):
        assert harmless(form(rows))
    assert SEEN in csv_text(rows)
    assert escape(NAME + "<b>") == SEEN + "&lt;b&gt;"
