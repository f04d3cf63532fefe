"""Commands and data sets that packages add by entry points."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedshift import datasets, recipes
from fedshift.errors import InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.task.preparing import prepare
from fedshift.plugins import PACKAGED
from support.command_line import code_of

Install = Callable[[str, str, str], None]
HOUSES = """
import numpy as np
import torch
from fedshift.datasets import Dataset, Entry, OwnClients, Samples, content_sha256
from fedshift.datasets.sites import Sites, split_sites

SITES, CLASSES = ("north", "south"), ("no", "yes")

def everything(folder):
    y = torch.arange(80) % 2
    x = y[:, None] + torch.tensor([[0.5, float((folder / "shift.txt").read_text())]])
    return x, y, torch.arange(80) // 40

def missing(folder):
    return () if (folder / "shift.txt").exists() else ("shift.txt",)

def read(folder):
    x, y, _ = everything(folder)
    return Samples(x[:60], y[:60]), Samples(x[60:], y[60:])

def at_sites(folder, seed, test):
    x, y, site = everything(folder)
    return Sites(x, y, site, SITES, CLASSES), split_sites(site.numpy(), 2, seed, test)

def clients(wanted):
    x, y = torch.ones(90, 2), torch.arange(90) % 2
    train, test = Samples(x[:60], y[:60]), Samples(x[60:], y[60:])
    data = Dataset("own", train, test, CLASSES, content_sha256(train, test), "generated", "none")
    parts = np.split(np.arange(60), wanted.clients)
    return OwnClients(data, parts, np.array([0.5, 0.5]), None, np.arange(30))

shared = dict(summary="", classes=CLASSES, examples=(60, 20), shape="2", licence="", page="")
DATASETS = (
    Entry("houses", folders=("houses",), missing=missing, read=read, by_hand="ask", sites=SITES,
          at_sites=at_sites, self_checked=True, **shared),
    Entry("own", built_in="generated", generate=lambda: None, clients=clients, **shared),
    Entry("mnist", built_in="generated", generate=lambda: None, **shared),
)
"""
GREET = """
import typer
app = typer.Typer(add_completion=False)
@app.command()
def greet(name: str) -> None:
    "Greet a client."
    print("hello", name)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package of one module on the path, with its source, group and entry point."""

    def put(source: str, group: str, entry: str) -> None:
        (tmp_path / "stranger_plugin.py").write_text(source)
        info = tmp_path / "stranger-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "stranger_plugin", raising=False)

    return put


def test_packages_add_commands_but_replace_none(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = "".join(f"{name} = stranger_plugin:app\n" for name in ("greet", "methods", "run"))
    install(GREET, "fedshift.commands", entries)
    assert code_of(monkeypatch, "greet", "Ann") == 0
    assert capsys.readouterr().out == "hello Ann\n"
    assert code_of(monkeypatch, "--help") == 0
    page = capsys.readouterr().out
    assert "Greet a client." in page
    assert "Run one experiment" in page
    assert code_of(monkeypatch, "methods", "fedavg") == 0
    assert "fedavg" in capsys.readouterr().out


def test_packages_add_data_sets(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {one.name for one in datasets.known()}
    install(HOUSES, "fedshift.datasets", "stranger = stranger_plugin:DATASETS")
    assert {one.name for one in datasets.known()} - before == {"houses", "own"}
    assert datasets.entry("mnist").folders  # Those of the core stay.
    (tmp_path / "houses").mkdir()
    (tmp_path / "houses" / "shift.txt").write_text("2")
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    sites = prepare(
        validate({"data": {"name": "houses", "validation": 0.0}, "model": {"name": "linear"}}
        | {"shift": {"kind": "natural", "target": "clients", "clients": 2}})
    )  # fmt: skip
    assert [len(c.y) for c in sites.task.clients] == [28, 28]
    assert [len(one.y) for one in sites.task.tests] == [12, 12]
    natural = {"data": {"name": "own", "validation": 0.0}, "model": {"name": "linear"}}
    prepared = prepare(validate(natural | {"shift": {"kind": "natural", "clients": 3}}))
    assert [len(c.y) for c in prepared.task.clients] == [20, 20, 20]
    with pytest.raises(InputError, match="clients of houses are its sites"):
        prepare(validate(natural | {"data": {"name": "houses"}, "shift": {"kind": "natural"}}))


def test_what_a_package_registers_as_data_sets_must_be_entries(install: Install) -> None:
    install("DATASETS = ('houses',)", "fedshift.datasets", "stranger = stranger_plugin:DATASETS")
    with pytest.raises(InputError, match='registers "stranger" as fedshift.datasets'):
        datasets.known()
    assert datasets.entry("mnist").name == "mnist"


def test_data_sets_of_a_package_must_be_in_a_tuple(install: Install) -> None:
    install("DATASETS = 3", "fedshift.datasets", "stranger = stranger_plugin:DATASETS")
    with pytest.raises(InputError, match=r"is no tuple of fedshift.datasets.Entry \(int\); update"):
        datasets.known()


def test_a_broken_package_is_named_and_leaves_other_commands_alone(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("import no_such_module", "fedshift.commands", "greet = stranger_plugin:app")
    assert code_of(monkeypatch, "greet", "Ann") == 2
    error = capsys.readouterr().err
    assert 'the package stranger registers "greet" as fedshift.commands' in error
    assert "No module named 'no_such_module'" in error
    assert "update or uninstall stranger" in error
    assert code_of(monkeypatch, "methods", "fedavg") == 0


def test_packages_add_methods_but_replace_none(install: Install) -> None:
    source = "def mine(setting, *, mu=0.1): ...\nfedprox = mine\nodd = 3"
    entries = (
        "mine = stranger_plugin:mine\nfedprox = stranger_plugin:mine\nodd = stranger_plugin:odd"
    )
    install(source, "fedshift.methods", entries)
    assert list(recipes.recipe("mine").options) == ["mu"]
    assert recipes.recipe("fedprox").summary
    assert "mine" not in {one.name for one in recipes.recipes()}
    with pytest.raises(InputError, match='registers "odd" as fedshift.methods, but .* no method'):
        recipes.recipe("odd")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import no_such_module", "cannot be loaded (ModuleNotFoundError"),
        ("def app(): pass", "is no typer.Typer (function); update or uninstall stranger"),
        ("import typer\napp = typer.Typer()", 'the plugin "greet" has no command'),
    ],
    ids=["import", "function", "empty"],
)
def test_a_broken_command_takes_no_other_away(
    source: str,
    problem: str,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(source, "fedshift.commands", "greet = stranger_plugin:app")
    assert code_of(monkeypatch, "greet") == 2
    assert problem in capsys.readouterr().err
    assert code_of(monkeypatch, "--help") == 0
    page, notes = capsys.readouterr()
    assert "reproduce" in page
    assert "left out: " in notes
    assert problem in notes
    assert code_of(monkeypatch, "reproduce") == 0
    assert "fedpals/table1" in capsys.readouterr().out


def test_the_project_file_registers_what_the_package_knows() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"] == PACKAGED


def test_a_command_of_the_core_loads_no_paper() -> None:
    """Control: `reproduce` does."""
    source = (
        "import sys; sys.argv = ['fedshift', {!r}, '--help']\n"
        "from fedshift.cli.app import main\ntry: main()\nfinally:\n"
        "    print([name for name in sys.modules if name.startswith('fedshift_papers')])"
    )
    loaded = {
        name: subprocess.check_output([sys.executable, "-c", source.format(name)], text=True)
        for name in ("run", "reproduce")
    }
    assert loaded["run"].splitlines()[-1] == "[]"
    assert "fedshift_papers.cli" in loaded["reproduce"].splitlines()[-1]
