"""Through which files a run goes from the command line to the first product of its training."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fedshift
from fedshift.cli.app import app
from fedshift.cli.ending import perform

PACKAGE = Path(fedshift.__file__).parent
ARCHITECTURE = PACKAGE.parent / "ARCHITECTURE.md"
MOST = 12
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"}


def listed() -> list[str]:
    """The files that ARCHITECTURE.md lists for this walk."""
    text = ARCHITECTURE.read_text()
    start = text.index("**From the command line to the first multiplication.**")
    block = text[start:].split("```")[1]
    return re.findall(r"[\w/]+\.py", block)


def walked(config: Path, out: Path, backend: str) -> list[str]:
    """The package's files on the call stack at the first product that a client's training makes.

    Outermost first, from the command on. Only products below the rounds and a client's training
    count: networks are tried before round 1, too.
    """
    first: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if first or event != "c_call" or arg.__name__ not in PRODUCTS:
            return
        files = list[str]()
        at: FrameType | None = frame
        while at is not None:
            path = Path(at.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                files.append(str(path.relative_to(PACKAGE)))
            at = at.f_back
        files.reverse()
        if "engine/run.py" in files and "client/local.py" in files:
            first.extend(dict.fromkeys(files[files.index("cli/app.py") :]))

    sys.setprofile(note)
    try:
        assert perform(app, ["run", str(config), "--out", str(out), "--backend", backend]) == 0
    finally:
        sys.setprofile(None)
    return first


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "one.toml"
    file.write_text(
        '[data]\nname = "fashion-mnist-mini"\n[shift]\nclients = 4\nkind = "iid"\n'
        '[model]\nname = "mlp"\nhidden = [16]\n[training]\nrounds = 1\nsteps = 2\n'
    )
    return file


def test_the_walk_is_the_one_that_is_drawn(config: Path, tmp_path: Path) -> None:
    """The control: clients trained one by one go another way."""
    files = walked(config, tmp_path / "dense", "dense")
    assert files == listed()
    assert len(files) <= MOST
    other = walked(config, tmp_path / "loop", "loop")
    assert other[:4] == files[:4]
    assert other != files
