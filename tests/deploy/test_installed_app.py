"""Clients run the code of their installation, whatever a server sends or names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResultStatus

from fedshift.errors import InputError
from fedshift_deploy.chosen import APP, CHOICES, SITE, imported
from fedshift_deploy.forking import CAN_FORK
from fedshift_deploy.inside import Launcher
from fedshift_deploy.joining import node_command
from fedshift_deploy.machines.deployed import site_of
from fedshift_deploy.notices import NOTICES
from fedshift_deploy.place import make_place
from support.loopback import loopback
from support.small_runs import text_of

# What Flower's process of a client's task does with an app that it was sent.
TASK = """
import sys
import threading
from importlib import import_module
from pathlib import Path
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import get_fab_config, get_metadata_from_config
import hashlib
if sys.argv[2] == "ours":
    from fedshift_deploy.app import run_the_installed_app
    run_the_installed_app()
process = import_module("flwr.supernode.runtime.run_clientapp")
sent = build_fab_from_disk(Path(sys.argv[1]))
process.install_from_fab(sent, skip_prompt=True)
load = process.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
app = load(*get_metadata_from_config(get_fab_config(sent)), hashlib.sha256(sent).hexdigest())
print(type(app).__name__)
"""


def spoil(app: Path, mark: Path, clientapp: str) -> None:
    """Put code that leaves a mark into an app, and name it as the client's."""
    project = app / "pyproject.toml"
    text = project.read_text()
    named = next(line for line in text.splitlines() if line.startswith("clientapp"))
    project.write_text(text.replace(named, f'clientapp = "{clientapp}"'))
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    code += "from flwr.clientapp import ClientApp\nclient_app = ClientApp()\n"
    inner = app / (clientapp.partition(":")[0].replace(".", "/") + ".py")
    inner.parent.mkdir(parents=True, exist_ok=True)
    for folder in [p for p in inner.parents if app in p.parents]:
        (folder / "__init__.py").touch()
    inner.write_text(code)


def task(app: Path, whose: str, home: Path) -> Any:
    line = [sys.executable, "-c", TASK, str(app), whose]
    env = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
    return subprocess.run(line, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.mark.slow
def test_the_code_that_a_server_sends_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither under another name nor under fedshift's; the control: Flower alone runs both."""
    monkeypatch.setenv(NOTICES, str(tmp_path / "notices"))
    for clientapp, answer in (
        ("evil:client_app", 'the server sends the app "evil:client_app", and this client runs'),
        (CHOICES[APP], "ClientApp"),
    ):
        place = tmp_path / clientapp.partition(":")[0]
        make_place(place / "f", "", 1, ["127.0.0.1"])
        spoil(place / "f" / "app", place / "ran", clientapp)
        ours = task(place / "f" / "app", "ours", place / "home")
        assert answer in ours.stdout + ours.stderr
        assert not (place / "ran").exists()
        flowers = task(place / "f" / "app", "flower's", place / "home")
        assert flowers.returncode == 0, flowers.stderr
        assert (place / "ran").exists()
    # The client's operator reads it, too.
    (line,) = (tmp_path / "notices").read_text().splitlines()
    assert 'the server sends the app "evil:client_app"' in json.loads(line)["trouble"]


@pytest.mark.slow
def test_a_federation_whose_server_sends_another_app(tmp_path: Path) -> None:
    text = text_of("fedavg").replace("clients = 3", "clients = 1")
    with loopback(tmp_path / "f", text, 1) as fed:
        spoil(tmp_path / "f" / "app", tmp_path / "ran", "evil:client_app")
        fed.join(0)
        with pytest.raises(InputError, match='the server sends the app "evil:client_app"'):
            fed.play(tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def test_a_source_of_data_that_the_server_names_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source named by the server would be code that it chooses."""
    mark = tmp_path / "ran"
    (tmp_path / "marking.py").write_text(f"open({str(mark)!r}, 'w')\ndef site(text, i): return i\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = {"experiment": text_of("fedavg"), "site": "marking:site"}
    node: Any = SimpleNamespace(run_config=given, node_config={"partition-id": 0})
    with pytest.raises(InputError, match='says that clients have data from "marking:site", and t'):
        site_of(node)
    assert not mark.exists()
    # The control: a client that has chosen it loads it.
    monkeypatch.setenv(SITE, "marking:site")
    assert site_of(node) == 0  # type: ignore[comparison-overlap]
    assert mark.exists()
    # A server that does not know of it would report that the experiment's data was dealt.
    for named in ("", CHOICES[SITE]):
        given["site"] = named
        with pytest.raises(InputError, match='write the same "site" into this client'):
            site_of(node)


def test_what_a_clients_own_file_may_choose(tmp_path: Path) -> None:
    make_place(tmp_path / "f", "", 1, ["127.0.0.1"], site="json:loads")
    place = tmp_path / "f" / "clients" / "client-0"
    client = json.loads((place / "client.json").read_text())
    assert client["site"] == "json:loads"
    assert node_command(place, "127.0.0.1:9")
    assert imported("json:loads") is json.loads
    for odd in ("json", "json:", "a b:c", "../x:y", 3):
        (place / "client.json").write_text(json.dumps(client | {"site": odd}))
        with pytest.raises(InputError, match=r'client.json: site ".*": write "module:name"'):
            node_command(place, "127.0.0.1:9")
    with pytest.raises(InputError, match='"json:nothing" cannot be loaded: module'):
        imported("json:nothing")


def test_tasks_of_servers_and_clients_and_no_others() -> None:
    """Flower's other kinds of tasks would run code that a server sends."""
    ours = {TaskType.SERVER_APP, TaskType.CLIENT_APP}
    assert Launcher().get_eligible_capacity(set(TaskType)) == (ours, set())
    for kind in set(TaskType) - ours:
        spec = ExecutionSpec(kind, "127.0.0.1:9", "token", True, None, False, 1, True, 7)
        assert Launcher().launch(spec).status == LaunchResultStatus.FAILED


@pytest.mark.parametrize(("number", "shown"), [("KILL", True), ("TERM", False)])
def test_a_killed_task_is_reported_on_the_clients_screen(
    number: str, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once; Flower takes a minute, and reports to the server. A normal end is not reported."""
    notices, stands_in = tmp_path / "notices", tmp_path / "python"
    stands_in.write_text(f"#!/bin/sh\nread token\necho begun >&2\nkill -{number} $$\n")
    stands_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stands_in))
    monkeypatch.setenv(NOTICES, str(notices))
    before = set(threading.enumerate())
    spec = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:9", "token", True, None, False, 1, True, 7)
    assert Launcher().launch(spec).status == LaunchResultStatus.ACCEPTED
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert notices.exists() is shown
    if shown:
        text = json.loads(notices.read_text())["trouble"]
        # On Linux it waits for messages, and may be killed between two of them.
        gave = "may have given" if CAN_FORK else "gave"
        why = "the process of its app was ended by signal 9, perhaps for lack of memory"
        assert text == f"this client {gave} the server no answer: {why}"
