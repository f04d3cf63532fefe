"""Commands and data sets that packages add, found by their entry points."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedshift.cli.app import main
from fedshift.plugins import PACKAGED

Install = Callable[[str, str, str], None]
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
    """Puts a package of one module on the path: its source, group and entry."""

    def put(source: str, group: str, entry: str) -> None:
        (tmp_path / "stranger_plugin.py").write_text(source)
        info = tmp_path / "stranger-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "stranger_plugin", raising=False)

    return put


def called(*args: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["fedshift", *args])
    try:
        main()
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def test_packages_add_commands_but_replace_none(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = "greet = stranger_plugin:app\nmethods = stranger_plugin:app"
    install(GREET, "fedshift.commands", entries)
    assert called("greet", "Ann", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == "hello Ann\n"
    assert called("--help", monkeypatch=monkeypatch) == 0
    assert "Greet a client." in capsys.readouterr().out
    assert called("methods", "fedavg", monkeypatch=monkeypatch) == 0
    assert "fedavg" in capsys.readouterr().out


def test_a_broken_package_is_named_and_leaves_other_commands_alone(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("import no_such_module", "fedshift.commands", "greet = stranger_plugin:app")
    assert called("greet", "Ann", monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert 'the package stranger registers "greet" as fedshift.commands' in error
    assert "No module named 'no_such_module'" in error
    assert "update or uninstall stranger" in error
    assert called("methods", "fedavg", monkeypatch=monkeypatch) == 0


def test_the_project_file_registers_what_the_package_knows() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"] == PACKAGED


def test_a_command_of_the_core_loads_no_paper() -> None:
    """Control: `reproduce` does."""
    source = (
        "import sys; sys.argv = ['fedshift', {!r}, '--help']\n"
        "from fedshift.cli.app import main\ntry: main()\nfinally:\n"
        "    print([name for name in sys.modules if name.startswith('fedshift.papers')])"
    )
    loaded = {
        name: subprocess.check_output([sys.executable, "-c", source.format(name)], text=True)
        for name in ("run", "reproduce")
    }
    assert loaded["run"].splitlines()[-1] == "[]"
    assert "fedshift.papers.cli" in loaded["reproduce"].splitlines()[-1]
