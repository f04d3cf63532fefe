"""The kit of deploy/: an image, a compose file, units of systemd, alerts.

Docker and systemd run nothing here. Their files are linted, and a federation is run by the very
commands that stand in them, as what they would start: a user without a name on a read-only root.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (extra ops)")
from prometheus_client import generate_latest

from fedshift.cli.app import app
from fedshift_deploy.metrics import ServerMetrics
from fedshift_deploy.processes import free_port
from support.containers import INSIDE, USER, Volume, can_contain, contained, expanded, volumes_of
from support.loopback import FEDSHIFT, environ

ROOT = Path(__file__).parents[2]
KIT = ROOT / "deploy"
EXAMPLE = ROOT / "examples" / "loopback" / "experiment.toml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((KIT / "compose.yaml").read_text())["services"]
UNITS = {path.name: path.read_text() for path in sorted((KIT / "systemd").iterdir())}
SERVER, CLIENT = "fedshift-server.service", "fedshift-client@.service"
CLIENTS = ("client-0", "client-1", "client-2")


def exec_start(unit: str, name: str, given: dict[str, str]) -> list[str]:
    """The arguments that systemd makes of ExecStart, for an instance and an environment file."""
    (line,) = re.findall(r"^ExecStart=(.*)$", UNITS[unit], re.M)
    words = []
    for word in shlex.split(line.replace("%i", name)):
        # $NAME alone is split into words; ${NAME} is part of one.
        bare = re.fullmatch(r"\$(\w+)", word)
        words += given.get(bare[1], "").split() if bare else [expanded(word, given)]
    return words


def commands() -> dict[str, list[str]]:
    """The arguments of fedshift in the kit's files, by place."""
    given = {"SERVER": "fed.example.org:8000"}
    units = {SERVER: exec_start(SERVER, "", given), CLIENT: exec_start(CLIENT, "client-0", given)}
    assert {words[0] for words in units.values()} == {"/opt/fedshift/bin/fedshift"}
    compose = {k: [expanded(w, {}) for w in s["command"]] for k, s in SERVICES.items()}
    return compose | {unit: words[1:] for unit, words in units.items()}


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse arguments as the command line does; an error for invalid ones."""
    command: Any = typer.main.get_command(app)
    context, left = None, list(arguments)
    while True:
        context = command.make_context("fedshift", [*left], parent=context)
        if not hasattr(command, "resolve_command"):
            return dict(context.params)
        _, command, left = command.resolve_command(
            context, [*arguments][len(arguments) - len(left) :]
        )


@pytest.mark.parametrize("place", commands())
def test_commands_are_ones_that_the_command_line_accepts(place: str) -> None:
    arguments = commands()[place]
    assert parsed(arguments)["log_format"] == "json"
    for wrong in ([*arguments, "--nothing"], [arguments[0], "serve", *arguments[2:]]):
        with pytest.raises(Exception, match=r"(?i)no such") as error:
            parsed(wrong)
        assert isinstance(error.value, click.UsageError) or hasattr(error.value, "format_message")


@pytest.mark.parametrize("name", SERVICES)
def test_services_may_do_little(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert expanded(service["user"], {}) == f"{USER}:{USER}"
    assert [place.split(":")[0] for place in service["tmpfs"]] == ["/tmp"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "devices"} & service.keys()
    # A client sees its folder alone.
    outside = {volume.split(":")[0] for volume in service["volumes"]}
    mine = "./federation" if name == "server" else f"./federation/clients/{name}"
    assert outside == {mine, "./data"}
    # What has no password is for this machine.
    ports = [port for port in service.get("ports", ()) if port.endswith(":9464")]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_image_runs_as_a_plain_user_and_pins_what_it_fetches() -> None:
    stages = (KIT / "Dockerfile").read_text().split("\nFROM ")
    assert re.findall(r"^USER (.*)$", stages[-1], re.M) == [f"{USER}:{USER}"]
    assert 'ENTRYPOINT ["fedshift"]' in stages[-1]
    # What is fetched has a hash, but for what builds our own wheel, which has a version.
    fetched = re.findall(r"bin/pip install (.*?)(?: \\\\)?$", stages[1], re.M)
    assert len(fetched) == 3
    assert [line for line in fetched if "--require-hashes" not in line] == ["--no-deps ."]
    assert "PIP_CONSTRAINT=/src/constraints.txt" in stages[1]
    # What is not named does not get into an image: no keys, no data.
    first, *named = (KIT / "Dockerfile.dockerignore").read_text().split("\n")[1:]
    assert first == "*"
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", "\n".join(stages), re.M)
    wanted = {f"!{word}" for line in copied for word in line.split()}
    assert wanted == {line for line in named if line.startswith("!")}
    assert all((ROOT / word[1:]).exists() for word in wanted)


HARD = ("NoNewPrivileges=yes", "ProtectSystem=strict", "PrivateTmp=yes", "ProtectHome=yes",
    "CapabilityBoundingSet=", "User=fedshift", "UMask=0077")  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_units_may_do_little(unit: str, tmp_path: Path) -> None:
    assert set(HARD) <= set(UNITS[unit].splitlines())
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # The same with the command of this environment: systemd looks whether it is there.
    here = UNITS[unit].replace("/opt/fedshift/bin/fedshift", FEDSHIFT)
    path = tmp_path / unit.replace("@", "@client-0")
    for text, whole in ((here, True), (here.replace("Restart=", "Restrat=no\nRestart=", 1), False)):
        path.write_text(text)
        verify = ["systemd-analyze", "verify", "--man=no", str(path)]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        assert (done.returncode == 0 and not done.stderr) is whole, done.stderr


def test_alerts_ask_for_what_is_served() -> None:
    served = generate_latest(ServerMetrics(CLIENTS, 0.0).registry).decode()
    names = set(re.findall(r"^(fedshift_\w+)", served, re.M))
    (group,) = yaml.safe_load((KIT / "alerts.yaml").read_text())["groups"]
    used = {n for rule in group["rules"] for n in re.findall(r"fedshift_\w+", rule["expr"])}
    assert used <= names
    assert len(used) >= 5


@pytest.mark.parametrize(
    ("words", "good", "bad"),
    [
        (["hadolint"], "Dockerfile", "USER 10001:10001"),
        (["promtool", "check", "rules"], "alerts.yaml", "expr: "),
    ],
    ids=("hadolint", "promtool"),
)
def test_linters(words: list[str], good: str, bad: str, tmp_path: Path) -> None:
    """The control: a file with a fault that the linter must report."""
    # The first is among the packages of the extra dev.
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (command := shutil.which(words[0], path=places)) is None:
        pytest.skip(f"{words[0]} is not installed")
    text = (KIT / good).read_text()
    for name, content, passes in ((good, text, True), ("bad", text.replace(bad, "USR "), False)):
        path = tmp_path / name
        path.write_text(content)
        lint = [command, *words[1:], str(path)]
        done = subprocess.run(lint, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is passes, done.stdout + done.stderr


def until(true: Any, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.5)


class Started:
    """Processes of commands of the kit, with their ports, folders and output."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, dict[str, subprocess.Popen[bytes]]()
        self.port, self.metrics = free_port(), {}
        self.places = {"./federation": folder / "federation", "./data": folder / "data"}
        for name in CLIENTS:
            self.places[f"./federation/clients/{name}"] = folder / "federation" / "clients" / name

    def start(self, name: str, command: list[str], volumes: list[Volume]) -> None:
        env = environ() | {"HOME": "/tmp", "FEDSHIFT_DATA": f"{INSIDE}/data"}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                contained(command, volumes), stdout=log, stderr=log, env=env
            )

    def local(self, name: str, words: Sequence[str]) -> list[str]:
        """The arguments with this machine's ports and folders in place of the kit's."""
        mine = self.metrics.setdefault(name, free_port())
        changes = {
            r"^/(federation|client)$": rf"{INSIDE}/\1", r"^server:8000$": f"127.0.0.1:{self.port}",
            r"^8000$": str(self.port), r"127\.0\.0\.1:946[45]": f"127.0.0.1:{mine}",
            r"^0\.0\.0\.0:9464$": f"0.0.0.0:{mine}", "^python$": sys.executable,
        }  # fmt: skip
        done = []
        for word in words:
            for old, new in changes.items():
                word = re.sub(old, new, word)
            done.append(word)
        return done

    def end(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            process.wait(60)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    if not can_contain():
        pytest.skip("no mount namespaces here, or no root to make them")
    one = Started(tmp_path)
    one.places["./data"].mkdir()
    init = [FEDSHIFT, "deploy", "init", str(EXAMPLE), str(one.places["./federation"])]
    changes = ["-c", "training.rounds=1", "-c", "training.steps=3"]
    subprocess.run([*init, *changes], check=True, env=environ(), stdout=subprocess.DEVNULL)
    subprocess.run(["chown", "-R", f"{USER}:{USER}", str(one.places["./federation"])], check=True)
    try:
        yield one
    finally:
        one.end()


@pytest.mark.slow
def test_the_compose_file_runs_a_federation(started: Started) -> None:
    def healthy(name: str) -> bool:
        test = SERVICES[name]["healthcheck"]["test"]
        assert test[0] == "CMD"
        check = contained(started.local(name, test[1:]), [])
        return subprocess.run(check, capture_output=True, check=False).returncode == 0

    assert not healthy("server")
    for name, service in SERVICES.items():
        words = started.local(name, [expanded(word, {}) for word in service["command"]])
        started.start(name, [FEDSHIFT, *words], volumes_of(service, started.places))
    for name in SERVICES:
        until(lambda name=name: healthy(name), 180, f"{name} is not healthy")
    assert started.running["server"].wait(600) == 0, (started.folder / "server.log").read_text()
    run = started.places["./federation"] / "run"
    assert (run / "summary.json").stat().st_uid == USER
    same_as_in_one_process(run, started.folder)
    until(lambda: not healthy("server"), 30, "a server that has ended is healthy")


@pytest.mark.slow
def test_the_units_run_a_federation(started: Started) -> None:
    state, given = started.folder / "lib", {"SERVER": f"127.0.0.1:{started.port}"}
    federation = started.places["./federation"]
    for name in ("server", *CLIENTS):
        unit = SERVER if name == "server" else CLIENT
        # The state folder of a machine: on the server the federation, else one client's folder.
        source = federation if name == "server" else federation / "clients" / name
        inside = "/federation" if name == "server" else f"/{name}"
        _, *words = exec_start(unit, name, given)
        local = [f"{INSIDE}{inside}" if w == inside[1:] else w for w in started.local(name, words)]
        started.start(name, [FEDSHIFT, *local], [(inside, source, "rw")])
    assert started.running["server"].wait(600) == 0, (started.folder / "server.log").read_text()
    same_as_in_one_process(federation / "run", started.folder)
    for name in CLIENTS:
        started.running[name].send_signal(signal.SIGTERM)
    # The codes that the unit takes for a stop.
    (codes,) = re.findall(r"^SuccessExitStatus=(.*)$", UNITS[CLIENT], re.M)
    assert {started.running[name].wait(60) for name in CLIENTS} <= set(map(int, codes.split()))
    assert not state.exists()


def same_as_in_one_process(run: Path, folder: Path) -> None:
    config = run / "config.resolved.toml"
    here = [FEDSHIFT, "run", str(config), "--out", str(folder / "here")]
    subprocess.run(here, check=True, env=environ(), stdout=subprocess.DEVNULL)
    for name in ("model.safetensors", "metrics.csv"):
        assert (run / name).read_bytes() == (folder / "here" / name).read_bytes()
