"""No reader of bytes from elsewhere can run code: a rule for the source, and poisoned unpicklers.

Processes of one machine talk by pickles: those of `engine/processes/pool.py`, and Ray's.
These bytes are the program's own.
"""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import poison
from support.poison import Guarded, PoisonedError

ROOT = Path(__file__).parents[1]
FOLDERS = ("fedshift", "fedshift_papers", "fedshift_deploy", "benchmarks", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
BANNED = {
    "pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "jsonpickle",
}  # fmt: skip
# Files without any of these words are not parsed, which takes most of the time.
WORDS = re.compile(
    "|".join(BANNED | {"pickle", "eval", "exec", "__import__", r"torch\.load", "unsafe", "recv"})
)
# Who may import pickle, and for what.
MAY = {
    "fedshift/datasets/safe_pickle.py": {"Unpickler"},
    "fedshift/engine/processes/pool.py": {"dumps"},
    "benchmarks/decoders.py": {"dumps"},
}
# Runs the files that an experiment names, when the command of their owner prepares it.
RUNS_FILES = "fedshift/experiments/config/python_names.py"
# Where messages between processes of this machine are received.
PIPES = {
    "fedshift/engine/processes/pool.py",
    "fedshift/sweeps/execute.py",
    "benchmarks/engine.py",
}


def breaches(name: str, source: str) -> list[str]:
    """The calls and imports of a file that could unpickle bytes or run them."""
    if not WORDS.search(source):
        return []
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            faults += [a.name for a in node.names if _banned(a.name) and not _may(name, a.name)]
        if isinstance(node, ast.ImportFrom) and _banned(node.module or ""):
            faults.append(f"from {node.module}")
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
            faults += [f"pickle.{node.attr}"] if node.attr not in MAY.get(name, set()) else []
        if isinstance(node, ast.Call):
            faults += _calls(name, node)
    return faults


def _banned(module: str) -> bool:
    return module.partition(".")[0] in BANNED


def _may(name: str, module: str) -> bool:
    return module == "pickle" and name in MAY


def _calls(name: str, node: ast.Call) -> list[str]:
    called = ast.unparse(node.func)
    given = {k.arg: ast.unparse(k.value) for k in node.keywords}
    faults = [called] if called in ("eval", "exec", "__import__") else []
    if (name, called) == (RUNS_FILES, "exec"):
        faults = []
    if called.endswith("torch.load") and given.get("weights_only") != "True":
        faults.append("torch.load without weights_only=True")
    if given.get("allow_pickle", "False") != "False":
        faults.append(f"{called}(allow_pickle)")
    if called.rpartition(".")[2] in ("read_pickle", "to_pickle", "unsafe_load", "loads_unsafe"):
        faults.append(called)
    if called.endswith(".recv") and not node.args and name not in PIPES:  # a socket's has a size
        faults.append(f"{called}: a pipe outside {PIPES}")
    return faults


def test_no_path_reads_a_pickle() -> None:
    names = {path: path.relative_to(ROOT).as_posix() for path in FILES}
    faults = {name: breaches(name, path.read_text()) for path, name in names.items()}
    assert {name: odd for name, odd in faults.items() if odd} == {}
    assert len(faults) > 200


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "import joblib", "from marshal import loads", "from pickle import loads",
        "import yaml", "import shelve", "torch.load(path)", "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)", "eval(text)", "pandas.read_pickle(path)",
        "connection.recv()", "np.lib.format.read_array(f, allow_pickle=yes)",
    ],
)  # fmt: skip
def test_the_rule_can_fail(line: str) -> None:
    assert breaches("fedshift/somewhere.py", line)


def test_what_the_rule_allows() -> None:
    for line in ("np.load(path)", "torch.load(path, weights_only=True)", "model.eval()"):
        assert breaches("fedshift/somewhere.py", line) == []
    assert breaches("benchmarks/decoders.py", "import pickle\npickle.loads(b'')")


def test_the_poison_refuses_and_lets_own_uses_through() -> None:
    """Run as another module, and as one of the named ones."""
    code = "import io\ndef read(pickle, data):\n    return pickle(io.BytesIO(data)).load()"
    data = pickle.dumps({"x": 1})
    for name, refused in (("fedshift.report.page", True), ("multiprocessing.queues", False)):
        space: dict[str, object] = {"__name__": name}
        exec(code, space)
        read = space["read"]
        assert callable(read)
        if refused:
            with pytest.raises(PoisonedError, match=r"fedshift.report.page unpickles bytes"):
                read(Guarded, data)
        else:
            assert read(Guarded, data) == {"x": 1}


FED = (
    "tests/engine/test_checkpoint.py",
    "tests/report/test_report_files.py",
    "tests/datasets/test_datasets_cifar.py",
    "tests/experiments/test_bad_files.py",
)


@pytest.mark.slow
def test_files_are_read_with_the_poison() -> None:
    """The tests that read most files, poisoned; CONTRIBUTING says how to run all."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FED],
        cwd=ROOT, env=os.environ | {poison.VARIABLE: "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
