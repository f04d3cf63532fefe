"""The files that a run passes from the command line to the first product of its training."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fedshift
from fedshift.cli.app import app
from fedshift.cli.ending import perform

PACKAGE = Path(fedshift.__file__).parent
ARCHITECTURE = PACKAGE.parent / "ARCHITECTURE.md"
MOST, MOST_ENTERED = 12, 46
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"}


def listed() -> list[str]:
    """The files that ARCHITECTURE.md lists for this walk."""
    text = ARCHITECTURE.read_text()
    start = text.index("**From the command line to the first multiplication.**")
    block = text[start:].split("```")[1]
    return re.findall(r"[\w/]+\.py", block)


def printed() -> int:
    """The number of files entered, according to ARCHITECTURE.md."""
    text = " ".join(ARCHITECTURE.read_text().split())
    return int(re.findall(r"functions of (\d+) files are called from `engine/run.py` on", text)[0])


def files_of(frame: FrameType | None) -> Iterator[str]:
    """The package's files on a call stack, the innermost first."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            yield str(path.relative_to(PACKAGE))
        frame = frame.f_back


def importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: its decorators' calls depend on what ran before."""
    while frame is not None and "importlib" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def walked(config: Path, out: Path, backend: str) -> tuple[list[str], set[str]]:
    """The package's files on the call stack at the first product, and those entered on the way.

    The stack outermost first, from the command on. Only products below the rounds and a client's
    training count: networks are tried before round 1, too. Entered are the files of functions that
    were called from engine/run.py on, at any depth, whether they have returned or not; imports are
    none.
    """
    first, paths = list[str](), set[str]()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if first:
            return
        code = frame.f_code
        if event == "call":
            new = code.co_filename.startswith(str(PACKAGE)) and code.co_filename not in paths
            if new and not importing(frame) and "engine/run.py" in files_of(frame):
                paths.add(code.co_filename)
        elif event == "c_call" and arg.__name__ in PRODUCTS:
            files = [*files_of(frame)][::-1]
            if "engine/run.py" in files and "client/local.py" in files:
                first.extend(dict.fromkeys(files[files.index("cli/app.py") :]))

    sys.setprofile(note)
    try:
        assert perform(app, ["run", str(config), "--out", str(out), "--backend", backend]) == 0
    finally:
        sys.setprofile(None)
    return first, {str(Path(path).relative_to(PACKAGE)) for path in paths}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "one.toml"
    file.write_text(
        '[data]\nname = "fashion-mnist-mini"\n[shift]\nclients = 4\nkind = "iid"\n'
        '[model]\nname = "mlp"\nhidden = [16]\n[training]\nrounds = 1\nsteps = 2\n'
    )
    return file


@pytest.mark.slow
def test_the_walk_is_the_one_that_is_drawn(config: Path, tmp_path: Path) -> None:
    """The control: clients trained one by one go another way."""
    files, entered = walked(config, tmp_path / "dense", "dense")
    assert files == listed()
    assert len(files) <= MOST
    assert len(entered) == printed() <= MOST_ENTERED
    other, others = walked(config, tmp_path / "loop", "loop")
    assert other[:4] == files[:4]
    assert other != files
    assert entered - others >= {"client/dense/phase.py", "kernels/products.py"}
    assert len(others) != printed()
