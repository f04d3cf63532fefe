"""A method, a loss term and a backend as a stranger adds them, by CONTRIBUTING's table."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("fedshift", "tests", "docs", "results/README.md", "pyproject.toml", "README.md")
ROWS = "tests/support/every_method.py"

RECIPE = '''

@method(Traits(page="fedprox", fixes_weights=True))
def fedprox_uniform(setting: Setting, *, mu: ProximalMu = 0.01) -> FedAvg:
    """FedProx that averages clients' models uniformly, whatever their sizes.

    Reference: Li et al. 2020, "Federated optimization in heterogeneous networks", Algorithm 2.
    Note: with clients of one size it is fedprox.
    """
    return replace(fedprox(setting, mu=mu), combine=Mean(Uniform()))
'''
TERM = '''

@dataclass(frozen=True)
class Ridge(Term):
    """(mu/2) ||theta||^2 over all trainable parameters."""

    mu: float

    def reads_data(self) -> bool:
        return False

    def __call__(self, view: View) -> Tensor:
        return self.mu / 2 * sq_norm(view.params)
'''

BACKEND = '''"""Clients trained one by one, the last one first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply


def backwards(backend: Backend) -> Backend:
    """`backend` with its clients in descending order."""

    def trained(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return backend(update, [*jobs][::-1])

    return trained
'''
EXPERIMENT = """
[data]
name = "fashion-mnist-mini"
limit = 200
[shift]
clients = 4
kind = "iid"
[model]
name = "mlp"
hidden = [8]
[training]
rounds = 2
steps = 2
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package, its tests and its pages, in another folder."""
    for name in COPIED:
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, place)
    return tmp_path


def add(path: Path, text: str, before: str = "") -> None:
    """Text at the end of a file, or before the first line that starts so."""
    old = path.read_text()
    at = re.search(rf"^{re.escape(before)}", old, re.M) if before else None
    assert at or not before
    i = at.start() if at else len(old)
    path.write_text(old[:i] + text + old[i:])


def failed(copy: Path, *args: str) -> str:
    """What pytest says of the tests that fail there; empty where all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    keys = {"PYTHONPATH": f"{copy}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *args], cwd=copy, env=os.environ | keys, capture_output=True, text=True
    )
    assert re.search(r"\d+ (passed|failed)", done.stdout), done.stdout + done.stderr
    return "" if done.returncode == 0 else done.stdout


@pytest.mark.slow
def test_a_method_is_a_function_and_a_row(copy: Path) -> None:
    """The control: without the row, and on no page, the tests say in a sentence what is missing."""
    lists = (
        "tests/recipes/test_contract.py::test_all_recipes_are_covered",
        "tests/docs/test_docs.py::test_every_method_has_a_page_or_a_section",
        "tests/docs/test_docs.py::test_every_option_of_a_method_is_documented",
    )
    add(copy / "fedshift/recipes/one_model.py", RECIPE)
    missing = failed(copy, *lists)
    assert "fedprox_uniform needs a row in tests/support/every_method.py" in missing
    assert "name fedprox_uniform on a page, as docs/methods/fedprox.md" in missing
    assert "fedprox_uniform needs a row in the table of docs/configuration.md" in missing
    row = '    "fedprox_uniform": lambda s: recipes.fedprox_uniform(s, mu=0.1),\n'
    add(copy / ROWS, row, '    "fedprox": ')
    add(copy / "docs/methods/fedprox.md", "\n`fedprox_uniform` averages clients uniformly.\n")
    add(copy / "docs/configuration.md", "| `fedprox_uniform` | `mu` |\n", "| `fedproxft` |")
    names = " or ".join(one.partition("::test_")[2] for one in lists)
    assert not failed(
        copy, "-m", "slow or not slow",
        "-k", f"fedprox_uniform or reference or known_by_name or {names}",
        "tests/recipes/test_contract.py", "tests/recipes/test_under.py", "tests/docs/test_docs.py",
        "tests/cli/test_methods.py",
        "tests/algorithms/test_references_variants.py", "tests/test_architecture.py",
        "tests/flower/test_flower.py", "tests/engine/test_workers.py",
    )  # fmt: skip


@pytest.mark.slow
def test_a_loss_term_is_a_class_and_a_row(copy: Path) -> None:
    add(copy / "fedshift/client/objectives.py", TERM)
    name = "fedavg + ridge"
    row = f'    "{name}": lambda s: FedAvg(s.model, CrossEntropy() + Ridge(0.1), s.local),\n'
    add(copy / ROWS, row, '    "fedprox": ')
    imports = "from fedshift.client.objectives import "
    add(copy / ROWS, f"{imports}Ridge\n", imports)
    assert not failed(
        copy, "-m", "slow or not slow", "-k", "ridge", "tests/recipes/test_contract.py",
        "tests/flower/test_flower.py", "tests/engine/test_workers.py",
        "tests/engine/test_running_sums.py",
    )  # fmt: skip


@pytest.mark.slow
def test_a_backend_is_a_module_and_a_row(copy: Path) -> None:
    """In one process and in two it gives the loop's model; the control: another seed."""
    (copy / "fedshift/engine/backwards.py").write_text(BACKEND)
    ways = copy / "fedshift/engine/backend_names.py"
    row = '"backwards": "fedshift.engine.backwards:backwards", "channels-last"'
    ways.write_text(ways.read_text().replace('"channels-last"', row, 1))
    (copy / "f.toml").write_text(EXPERIMENT)

    def model(name: str, *options: str) -> bytes:
        command = [sys.executable, "-m", "fedshift", "run", "f.toml", "--out", name, *options]
        keys = {"PYTHONPATH": f"{copy}", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=copy, env=os.environ | keys, check=True, capture_output=True)
        return (copy / name / "model.safetensors").read_bytes()

    loop = model("loop", "--backend", "loop")
    assert model("alone", "--backend", "backwards") == loop
    assert model("two", "--backend", "backwards", "--workers", "2") == loop
    assert model("other", "--backend", "backwards", "-c", "seeds.run=1") != loop
