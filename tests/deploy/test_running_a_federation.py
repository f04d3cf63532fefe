"""The commands of docs/running-a-federation.md work in the page's order."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (extra ops)")
from fedshift.errors import InputError
from fedshift_deploy.command import init
from fedshift_deploy.metrics import ServerMetrics, client_metrics
from fedshift_deploy.place import clients_of
from fedshift_deploy.processes import free_port
from support.loopback import FEDSHIFT, environ, gone
from support.own_sites import FILE

ROOT = Path(__file__).parents[2]
STAY = ("fedshift deploy server", "fedshift deploy client")
PAGE = (ROOT / "docs" / "running-a-federation.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
# Those for root, indented: of containers, of systemd and of the installation.
INDENTED = re.findall(r"(?:^    .*\n)+", PAGE, re.M)
LONG = [line for line in COMMANDS if line.startswith(STAY)]


def run(line: str) -> str:
    name, *rest = shlex.split(line)
    assert name in ("fedshift", "tar", "mkdir"), line
    words = [FEDSHIFT if name == "fedshift" else name, *rest]
    done = subprocess.run(words, capture_output=True, text=True, env=environ(), check=False)
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples" / "loopback" / "experiment.toml", "experiment.toml")
    return tmp_path


@pytest.mark.slow
def test_the_commands_that_end(here: Path) -> None:
    for line in COMMANDS:
        if line.startswith("fedshift deploy check"):
            run(f"{line} --port {free_port()}")
        elif line not in LONG:
            run(line)
    assert len(clients_of(Path("federation-2"))) == 4
    assert len(clients_of(Path("restored/federation"))) == 3


def test_another_site_can_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With data of their own: no site gets the number, and so the key, of another one."""
    file, old = tmp_path / "experiment.toml", tmp_path / "old"
    file.write_text(FILE)
    init(file, old, ["localhost"], [])
    four = 'data.clients=["coast", "east", "south", "{}"]'
    init(file, tmp_path / "new", [], [four.format("west")], keys=old)
    assert "and take the experiment.toml of the new one" in " ".join(
        capsys.readouterr().out.split()
    )
    with pytest.raises(InputError, match='client-2 of .*old is "south", and would be "north" here'):
        init(file, tmp_path / "odd", [], [four.format("north")], keys=old)
    assert not (tmp_path / "odd").exists()


def local(line: str, port: int, metrics: int) -> list[str]:
    """A command of the page on this machine: its ports, and the folder that was handed over."""
    changes = {"8000": str(port), "fed.example.org:8000": f"127.0.0.1:{port}", "9464": str(metrics)}
    return [FEDSHIFT, *(changes.get(word, word) for word in shlex.split(line)[1:])]


def open_to_others(paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.stat().st_mode & 0o077]


# In the place of commands that need root: their words, and what is there when ownership is given.
STANDS_IN = """#!/bin/sh
echo "${0##*/} $*" >> "$ROOT/calls"
if [ "${0##*/}" = chown ]; then find "$3" | sort > "$ROOT/owned"; fi
"""


def set_up(root: Path, lines: list[str]) -> subprocess.CompletedProcess[str]:
    """Do the page's steps for systemd in a new folder in the place of /; stop at a failure."""
    for place in ("etc/systemd/system", "var/lib", "bin", "checkout/deploy", "federation"):
        (root / place).mkdir(parents=True)
    (root / "client-0").mkdir()
    shutil.copytree(ROOT / "deploy" / "systemd", root / "checkout" / "deploy" / "systemd")
    for name in ("useradd", "chown", "systemctl"):
        (root / "bin" / name).write_text(STANDS_IN)
        (root / "bin" / name).chmod(0o700)
    script = re.sub(r"(?<= )/(?=etc|var|opt)", f"{root}/", "\n".join(lines))
    return subprocess.run(
        ["sh", "-e", "-c", script], cwd=root / "checkout", capture_output=True, text=True,
        env={"PATH": f"{root / 'bin'}:/usr/bin:/bin", "ROOT": str(root)}, check=False,
    )  # fmt: skip


def test_the_steps_for_systemd_end_in_what_the_units_need(tmp_path: Path) -> None:
    (block,) = (b for b in INDENTED if "useradd" in b)
    lines = [line.strip() for line in block.splitlines()]
    done = set_up(tmp_path, lines)
    assert done.returncode == 0, done.stderr
    units = "".join(p.read_text() for p in (tmp_path / "etc/systemd/system").iterdir())
    needed = re.findall(r"^(?:EnvironmentFile|WorkingDirectory)=(/\S+)", units, re.M)
    assert len(needed) == 3
    needed += re.findall(r"FEDSHIFT_DATA=(/\S+)", units)
    for path in needed:
        assert (tmp_path / path[1:]).exists(), path
    # All in that folder is the user's: nothing comes into it later.
    owned = (tmp_path / "owned").read_text().split()
    state = tmp_path / "var" / "lib" / "fedshift"
    assert owned == sorted(map(str, [state, *state.rglob("*")]))
    assert {"federation", "client-0"} <= {path.name for path in state.iterdir()}
    assert "chown --recursive fedshift: " in (tmp_path / "calls").read_text()
    # The optional file for options, which the text names, has its folder.
    assert all((tmp_path / p[1:]).is_dir() for p in re.findall(r"`(/etc/\w+)/\S+`", PAGE))


def test_without_its_mkdir_a_step_fails(tmp_path: Path) -> None:
    """The control of the test above."""
    (block,) = (b for b in INDENTED if "useradd" in b)
    lines = [line.strip() for line in block.splitlines() if not line.strip().startswith("mkdir")]
    assert set_up(tmp_path, lines).returncode != 0
    assert not (tmp_path / "etc" / "fedshift").exists()


def test_each_place_of_a_block_is_made() -> None:
    """Folders that commands write to are made by an earlier command, or exist on any machine."""
    there = {"/etc", "/etc/systemd/system", "/opt", "/var/lib", "."}
    for block in [*INDENTED, *BLOCKS]:
        made = set(there)
        for line in block.splitlines():
            for step in line.split("#")[0].split("&&"):
                name, *words = shlex.split(step) or [""]
                paths = [word for word in words if not word.startswith("-")]
                if name == "mkdir":
                    made |= {str(p) for path in paths for p in (Path(path), *Path(path).parents)}
                targets = [paths[-1]] if name in ("mv", "cp") else []
                targets += [words[words.index("--directory") + 1]] if "--directory" in words else []
                targets += [str(Path(words[-1]).parent)] if ">" in words else []
                assert {str(Path(target)) for target in targets} <= made, step


@pytest.mark.slow
def test_the_commands_that_stay(here: Path) -> None:
    """A server that is stopped in round 2 goes on with the page's command."""
    serve, join, resume = LONG
    few = ("training.rounds=3", "training.steps=3", "training.evaluate_every=3")
    run(COMMANDS[0] + "".join(f" -c {one}" for one in few))
    port, metrics, clients = free_port(), free_port(), []
    for i in range(3):
        shutil.copytree(f"federation/clients/client-{i}", f"client-{i}")
        words = [word.replace("client-0", f"client-{i}") for word in local(join, port, metrics)]
        with Path(f"client-{i}.log").open("w") as log:
            clients.append(subprocess.Popen(words, env=environ(), stderr=log))
    try:
        with Path("server.log").open("w") as log:
            first = subprocess.Popen(local(serve, port, metrics), env=environ(), stderr=log)
        # Later than the round's event, and what `--resume` needs.
        checkpoints, end = Path("federation/run/checkpoints"), time.monotonic() + 300
        while not list(checkpoints.rglob("round.json")):
            assert time.monotonic() < end
            assert first.poll() is None
            time.sleep(0.5)
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=60) as answer:
            numbers = answer.read().decode()
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 143
        assert (
            subprocess.run(local(resume, port, metrics), env=environ(), timeout=400).returncode == 0
        )
    finally:
        for client in clients:
            client.send_signal(signal.SIGTERM)
            client.wait(60)
    alone = [FEDSHIFT, "run", "federation/experiment.toml", "--out", "alone"]
    subprocess.run(alone, check=True, env=environ(), stdout=subprocess.DEVNULL)
    for name in ("model.safetensors", "metrics.csv"):
        assert Path("alone", name).read_bytes() == Path("federation/run", name).read_bytes()
    assert "fedshift_dropouts_total{" in numbers
    assert "_created" not in numbers
    # Counts, models, logs and Flower's own files; the control is a log that this test opened.
    made = [path for name in ("federation", "client-0") for path in Path(name).rglob("*")]
    assert {Path("federation/run/clients.csv"), Path("client-0/supernode.log")} <= {*made}
    assert open_to_others(made) == []
    assert open_to_others([Path("server.log")]) != []
    # The log lines that operators wait for.
    server_log = [json.loads(line) for line in Path("server.log").read_text().splitlines()]
    assert server_log[0]["event"] == "listening"
    assert "begins with all 3 clients" in server_log[0]["message"]
    for i in range(3):
        assert f'"joined 127.0.0.1:{port}"' in Path(f"client-{i}.log").read_text()
    assert gone(str(here))


def test_every_metric_has_its_row() -> None:
    registries = ServerMetrics(["client-0"], 0.0).registry, client_metrics(lambda: True, 0.0)
    served = {
        family.name + ("_total" if family.type == "counter" else "")
        for registry in registries
        for family in registry.collect()
    }
    assert served == set(re.findall(r"`(fedshift_\w+)[`{]", PAGE.split("## Watch")[1]))


def test_alerts_on_the_page_are_in_the_file() -> None:
    file = " ".join((ROOT / "deploy" / "alerts.yaml").read_text().split())
    for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S):
        for line in block.splitlines():
            assert line.strip() in file
