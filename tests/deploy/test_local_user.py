"""Attacks on a federation by another user of the server's machine, and by another machine.

Real processes, a real second user, a second network. Each attack has its control: it succeeds on
Flower alone, or for the user that runs the server.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.runtime import RuntimeHttpClient

from fedshift.experiments.config.load import dumps
from fedshift_deploy.federation import environment
from fedshift_deploy.inside import SOCKET, call_over
from fedshift_deploy.keys import read_client_key, write_client_key
from fedshift_deploy.place import make_place
from fedshift_deploy.processes import free_port, running, wait_for
from support.another_user import (
    SERVER,
    another_machine,
    command_lines,
    elsewhere,
    needs_root,
    ports_of,
    sockets_named,
)
from support.loopback import Loopback, loopback, processes
from support.small_runs import config_of

pytestmark = [pytest.mark.slow, needs_root]
PROJECT = """\
[project]
name = "evil"
version = "1.0.0"
description = "evil"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "evil"
[tool.flwr.app.components]
serverapp = "evil:app"
clientapp = "evil:app"
"""


def write_key(folder: Path) -> Path:
    write_client_key(folder / "key")
    return folder / "key"


def evil(mark: Path) -> bytes:
    """An app that writes a file, on the server and on every client that loads it."""
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\napp = None\n"
    return build_fab_from_files({"pyproject.toml": PROJECT.encode(), "evil.py": code.encode()})[0]


def calls(mark: Path, key: Path) -> dict[str, tuple[type[ProtobufClient], str, Any]]:
    """Calls that start a run, register the caller's key, and take the server's task."""
    app = evil(mark)
    fab = fab_to_proto(Fab(hashlib.sha256(app).hexdigest(), app, {}))
    register = RegisterNodeRequest(public_key=read_client_key(key.with_name("key.pub"))[0])
    take = AcquireTaskRequest(supported_task_types=list(TaskType))
    return {
        "take a task": (RuntimeHttpClient, "AcquireTask", take),
        "start a run": (ControlHttpClient, "StartRun", StartRunRequest(fab=fab)),
        "register a key": (ControlHttpClient, "RegisterNode", register),
    }


def tried(url: str, given: dict[str, Any], path: str = "") -> dict[str, int]:
    """The status of each call's answer; 0 for no answer."""
    codes = {}
    if path:
        call_over(path)
    for name, (kind, method, request) in given.items():
        client = kind(url, verify=False, interceptors=[RuntimeVersionHttpInterceptor("flwr CLI")])
        try:
            getattr(client, method)(request)
            codes[name] = 200
        except httpx.HTTPStatusError as e:
            codes[name] = e.response.status_code
        except httpx.HTTPError:
            codes[name] = 0
    return codes


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    folder = tmp_path_factory.mktemp("attacked") / "federation"
    training = {"rounds": 2, "steps": 2, "lr": 0.05}
    text = dumps(config_of("fedavg", shift={"kind": "iid", "clients": 1}, training=training))
    with loopback(folder, text, 1, host="0.0.0.0") as made:
        made.join(0)
        yield made


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The attacks, tried once in vain, since another user may be unable to read lazy imports."""
    place = tmp_path_factory.mktemp("evil")
    made = calls(place / "ran", write_key(place))
    assert set(tried(f"https://127.0.0.1:{free_port()}", made).values()) == {0}
    return made


def test_flower_alone_is_taken_over(tmp_path: Path, given: dict[str, Any]) -> None:
    """The control: another user runs code as the user of Flower's own SuperLink."""
    mark = tmp_path / "ran"
    attack = calls(mark, write_key(tmp_path))
    make_place(tmp_path / "f", "", 1, ["127.0.0.1"])
    port, log, env = free_port(), tmp_path / "log", environment(tmp_path / "flower")
    beside = Path(sys.executable).parent
    arguments = [
        str(beside / "flower-superlink"), "--host", "127.0.0.1", "--port", str(port),
        "--enable-supernode-auth", "--ssl-ca-certfile", str(tmp_path / "f" / "ca.crt"),
        "--ssl-certfile", str(tmp_path / "f" / "server.crt"),
        "--ssl-keyfile", str(tmp_path / "f" / "server.key"),
    ]  # fmt: skip
    env["PATH"] = f"{beside}{os.pathsep}{env['PATH']}"
    with running(arguments, env, log) as process:
        wait_for("127.0.0.1", port, process, log)
        codes = elsewhere(lambda: tried(f"https://127.0.0.1:{port}", attack))
        assert codes == dict.fromkeys(attack, 200)
        end = time.monotonic() + 120
        while not mark.exists() and time.monotonic() < end:
            time.sleep(0.5)
    assert mark.stat().st_uid == os.geteuid()


def test_another_user_can_give_no_orders(fed: Loopback, given: dict[str, Any]) -> None:
    """By the port it gets 403, and it cannot open the socket. The owner can, by the same calls."""
    url = f"https://127.0.0.1:{fed.port}"
    assert elsewhere(lambda: tried(url, given)) == dict.fromkeys(given, 403)
    assert fed.link is not None
    path = fed.link.env[SOCKET]
    assert elsewhere(lambda: tried(url, given, path)) == dict.fromkeys(given, 0)
    take = {"take a task": given["take a task"]}
    assert elsewhere(lambda: tried(url, take, path), user=0) == {"take a task": 200}


def test_no_port_and_no_token_is_left_to_another_user(fed: Loopback) -> None:
    """A SuperNode listens on no port, a SuperLink on the federation's alone; no token is shown."""
    seen: set[str] = set()
    ports: set[str] = set()

    def look(event: dict[str, Any]) -> None:
        seen.update(elsewhere(command_lines))
        ours = processes(str(fed.folder)).keys() | processes("fedshift_deploy.inside").keys()
        ports.update(ports_of(ours))

    fed.heard = look
    fed.play(fed.folder / "run")
    assert {int(at.split(":")[1], 16) for at in ports} == {fed.port}
    tasks = [line for line in seen if "deploy.inside flwr-serverapp" in line]
    assert tasks
    assert not [line for line in tasks if "token" in line]
    node = Path(f"/proc/{fed.node(0)}/environ")
    with pytest.raises(AssertionError, match="PermissionError"):
        elsewhere(node.read_text)
    paths = [fed.folder, *fed.folder.rglob("*")]
    assert fed.folder / "run" / "clients.csv" in paths
    assert [str(p) for p in paths if stat.S_IMODE(p.lstat().st_mode) & 0o077] == []
    assert fed.link is not None
    for path in (fed.link.env[SOCKET], path_in(node.read_text())):
        assert path in sockets_named("/fedshift-")
        assert stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o700
        assert not elsewhere(lambda path=path: opens(path))
        assert opens(path)


def opens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as s:
        return s.connect_ex(path) == 0


def path_in(environment: str) -> str:
    (line,) = (line for line in environment.split("\0") if line.startswith(f"{SOCKET}="))
    return line.partition("=")[2]


def test_another_machine_can_give_no_orders(fed: Loopback, given: dict[str, Any]) -> None:
    with another_machine() as network:
        url = f"https://{SERVER}:{fed.port}"
        codes = elsewhere(lambda: tried(url, given), user=0, network=network)
        assert codes == dict.fromkeys(given, 403)
        # The control: from there nothing else is in the way.
        nowhere = elsewhere(lambda: tried(f"https://{SERVER}:9", given), user=0, network=network)
        assert nowhere == dict.fromkeys(given, 0)
