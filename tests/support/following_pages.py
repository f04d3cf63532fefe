"""Follow a page of docs/how-to: save its files, run its Python and its commands."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import io
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedshift.cli.app import app
from fedshift.cli.ending import perform
from support.shown import alike

STEP = re.compile(r"^```(\w+)\n(.*?)^```|^## ", re.M | re.S)  # a block, or where a section begins
FILE = re.compile(r"# (\w+\.(?:py|toml))\n")
ELSEWHERE = {"pip", "tensorboard", "mlflow", "wandb"}  # commands of others are not run

# Extras by what needs them; a block of one that is not installed is left out, with its output.
EXTRAS = {
    "fs.TensorBoard(": "tensorboard",
    "fs.MLflow(": "mlflow",
    "fs.WandB(": "wandb",
    "import onnx": "onnx",
    "from onnx": "onnx",
    "matplotlib": "matplotlib",
    "--figures": "matplotlib",
    "from datasets import": "datasets",
    "flwr_datasets": "flwr_datasets",
    "from sklearn": "sklearn",
}


def follow(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all blocks of a page in order, in the current folder.

    A block of Python or TOML whose first line is a comment with a file's name is that file; other
    Python runs. A section has the names defined above the first section, and none of the other
    sections, as for a reader that follows a link. Blocks of `sh` run `fedshift`. The output below
    a block must be what was printed: `text` exactly, `console` up to the last digits.
    """
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # dataclasses look their module up
    printed: str | None = ""
    top: dict[str, Any] | None = None
    for match in STEP.finditer(text):
        kind, code = match.groups()
        if kind is None:
            top = dict(vars(module)) if top is None else top
            vars(module).clear()
            vars(module).update(top)
        elif kind in ("text", "console"):
            assert printed is None or is_shown(kind, code, printed), printed
        else:
            printed = _done(kind, code, module) if _can_run(code) else None


def _can_run(code: str) -> bool:
    needs = {extra for word, extra in EXTRAS.items() if word in code}
    specs = map(importlib.util.find_spec, needs)
    return all(spec and spec.origin for spec in specs)  # tests/datasets is a folder, no library


def is_shown(kind: str, shown: str, printed: str) -> bool:
    """Whether an output shown on a page equals what was printed."""
    return printed == shown or (kind == "console" and alike(shown, printed))


def _done(kind: str, code: str, module: ModuleType) -> str:
    """The output of a block when it is run."""
    out = io.StringIO()
    name = FILE.match(code)
    if name:
        Path(name[1]).write_text(code)
    elif kind == "python":
        with contextlib.redirect_stdout(out):
            exec(code, vars(module))
    elif kind == "sh":
        with contextlib.redirect_stdout(out):
            for line in code.replace("\\\n", " ").splitlines():
                _run(line)
    else:
        raise AssertionError(f"a block of {kind} that is no file: begin it with # NAME.{kind}")
    return out.getvalue()


def _run(line: str) -> None:
    """The output of one shell line."""
    name, *arguments = shlex.split(line, comments=True) or [""]
    if name == "fedshift":
        files = [f for a in arguments for f in (sorted(glob.glob(a)) if "*" in a else [a])]
        assert perform(app, files) == 0, line
    else:
        assert name in {"", *ELSEWHERE}, line
