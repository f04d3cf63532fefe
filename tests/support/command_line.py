"""The command line in this process."""

from __future__ import annotations

import sys

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
