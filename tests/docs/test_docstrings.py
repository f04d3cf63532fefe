"""The examples of docstrings are executed; those of the reference have imported `fs` alone."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
from pathlib import Path

import pytest

import fedshift as fs

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.glob("fedshift*/**/*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
}
SHOWN = {
    name
    for page in (ROOT / "docs/reference").glob("*.md")
    for name in re.findall(r"^::: \S+\.(\w+)", page.read_text(encoding="utf-8"), re.M)
}
LONG = (
    "fedshift.fitting.compare",
    "fedshift.fitting.fit",
    "fedshift.fitting.result",
    "fedshift.sweeps.table",
)
PENGUINS = ("fedshift.datasets.natural.loading", "fedshift.datasets.natural.table")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in FILES]
)
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if name in PENGUINS:
        pytest.importorskip("palmerpenguins", reason="palmerpenguins is missing (extra data)")
    if '"patients.csv"' in FILES[name].read_text(encoding="utf-8"):
        pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra dev)")
        runpy.run_path(str(ROOT / "examples/breast_cancer.py"))["write"]("patients.csv")
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for one in doctest.DocTestFinder().find(module):
        shown = one.name.removeprefix(f"{name}.").split(".")[0] in SHOWN
        one.globs = {**({} if shown else vars(module)), "fs": fs}
        runner.run(one)
    assert runner.tries
    assert not runner.failures


def test_a_wrong_example_is_noticed() -> None:
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(example, out=lambda _: None).failed == 1
