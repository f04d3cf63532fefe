"""The command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedshift.cli.app import main


def code_of(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """The exit code of `fedshift ARGS`."""
    monkeypatch.setattr(sys, "argv", ["fedshift", *args])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def calling(*before: str) -> Any:
    """A fixture: `fedshift BEFORE ARGS` in an empty folder, as (exit code, stdout, stderr)."""

    @pytest.fixture
    def call(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str, str]]:
        monkeypatch.chdir(tmp_path)

        def run(*args: str) -> tuple[int, str, str]:
            code = code_of(monkeypatch, *before, *args)
            out, err = capsys.readouterr()
            return code, out, err

        return run

    return call
