"""Flower's simulation on Ray: the same run, and nothing left behind. Minutes, so slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.federations import SIZES, hears_ctrl_c

pytest.importorskip("ray", reason="Ray is not installed (extra flower)")
from fedshift.errors import InputError
from fedshift.flower.quiet import quiet

pytestmark = pytest.mark.slow
METHODS = ("fedavg", "scaffold", "ditto", "feddrm", "labelset_fedavg")
SCRIPT = str(Path(sys.executable).with_name("fedshift"))
CONFIG = """
[shift]
clients = 4
[model]
name = "mlp"
hidden = [16]
[method]
name = "fedpals"
ess = 0.5
[training]
rounds = 3
steps = 5
evaluate_every = 1
"""


@pytest.fixture(scope="module", autouse=True)
def tests_on_the_path() -> Any:
    """Ray's processes import the clients from this folder."""
    before = os.environ.get("PYTHONPATH")
    here = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, before]))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def left_of_ray(session: int) -> list[str]:
    """Processes of a session that are still at work."""
    listed = subprocess.run(
        ["ps", "-eo", "sid,stat,args"], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    return [row[2] for row in rows if int(row[0]) == session and not row[1].startswith("Z")]


# The models that clients serve are scored on all clients' examples, as in one process.
OWN = CONFIG.replace("clients = 4", 'clients = 4\nkind = "iid"\ntarget = "clients"')
OWN = OWN.replace('"fedpals"\ness = 0.5', '"ditto"')


@pytest.mark.parametrize("text", [CONFIG, OWN], ids=["server", "clients"])
def test_the_command_leaves_the_same_folder(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(text)
    for place, more in (("here", []), ("there", ["--engine", "flower-sim", "--actors", "2"])):
        args = [SCRIPT, "run", "t.toml", "--out", place, *more]
        subprocess.run(args, cwd=tmp_path, check=True, capture_output=True)
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "there").iterdir())
    for name in {*names} - {"events.jsonl", "report.html"}:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_everything(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(CONFIG.replace("rounds = 3", "rounds = 100000"))
    args = [SCRIPT, "run", "t.toml", "--out", "r", "--engine", "flower-sim", "--actors", "1"]
    events = tmp_path / "r" / "events.jsonl"
    with subprocess.Popen(
        args, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=hears_ctrl_c
    ) as job:
        for _ in range(3600):
            if events.exists() and '"round": 2,' in events.read_text():
                break
            time.sleep(0.05)
        job.send_signal(number)
        err = job.communicate(timeout=120)[1].decode()
    assert job.returncode == code
    assert err.splitlines()[-1].startswith("interrupted")
    assert json.loads(events.read_text().splitlines()[-1])["error"] == "interrupted"
    for _ in range(200):
        if not left_of_ray(job.pid):
            break
        time.sleep(0.05)
    assert left_of_ray(job.pid) == []


@pytest.fixture(scope="module")
def grid() -> Iterator[Any]:
    """One simulation for all methods: each start of Ray's processes takes ten seconds."""
    from support.simsites import app

    with quiet():
        from fedshift.flower.simulation import simulation

        torch.set_num_threads(1)
        with simulation(app, len(SIZES), actors=2) as made:
            yield made


@pytest.mark.parametrize("name", METHODS)
def test_rays_processes_give_the_same_bits(name: str, grid: Any) -> None:
    from fedshift.flower import play
    from support.flower_runs import differing_tensors, in_process, strategy_of
    from support.simsites import Naming, build

    algorithm, federation = build(name)
    strategy = strategy_of(algorithm, federation, patience=600.0)
    *_, there = play(strategy, Naming(grid, name), 3, states=lambda t: t == 3)
    assert there.dropped == ()
    assert differing_tensors(in_process(algorithm, federation, 3), there) == []
    # The control: another method.
    other = build("scaffold" if name == "fedavg" else "fedavg")
    assert differing_tensors(in_process(*other, 3), there) != []


def test_a_client_app_that_fails_in_every_process_is_an_error(grid: Any) -> None:
    from support.flower_runs import strategy_of
    from support.simsites import Naming, build

    strategy = strategy_of(*build("fedavg"), patience=600.0)
    with pytest.raises(InputError, match="cannot take part: KeyError: 'no such'"):
        strategy.begin(Naming(grid, "no such"))
