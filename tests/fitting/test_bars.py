"""Progress from Python: on a terminal, in a notebook, or not at all."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import fedshift as fs
from fedshift.fitting.bars import in_notebook, shown_progress
from support.custom_tasks import Net, hospitals

QUICK: dict[str, Any] = {"rounds": 2, "steps": 1, "evaluate_every": 1}


def notebook(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """A stand-in for IPython's notebook, and what it shows, in order and by type."""
    shown: list[dict[str, str]] = []

    def update(given: dict[str, str], raw: bool) -> None:
        assert raw  # or IPython would show the dict itself
        shown.append(given)

    class ZMQInteractiveShell:
        pass

    handle = SimpleNamespace(update=update)
    display = SimpleNamespace(display=lambda given, raw, display_id: handle)
    shell = SimpleNamespace(get_ipython=ZMQInteractiveShell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


@pytest.mark.slow
def test_a_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = notebook(monkeypatch)
    assert in_notebook()
    fs.fit(hospitals(), Net, name="a run", **QUICK)
    assert 'a run <progress value="2" max="2">' in shown[-1]["text/html"]
    assert "target" in shown[-1]["text/html"]
    assert shown[-1]["text/plain"].startswith("a run 2/2 ")
    shown.clear()
    fs.fit(hospitals(), Net, progress=False, **QUICK)
    assert not shown


@pytest.mark.slow
def test_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fs.fit(hospitals(), Net, **QUICK)
    assert capsys.readouterr().err == ""  # here stderr is no terminal
    fs.fit(hospitals(), Net, progress=True, **QUICK)
    assert "2/2" in capsys.readouterr().err


def test_without_ipython_there_is_no_notebook() -> None:
    assert not in_notebook()
    with shown_progress(None) as listen:
        listen({"event": "round"})
