"""FedDRM on real processes of loopback, whose server is killed while the router is fitted. Slow."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.experiments.folder.routers import Fit, load_router
from fedshift.experiments.folder.run_models import load_models
from fedshift_deploy.processes import free_port
from fedshift_deploy.sites.own_model import load_own_model
from support.federation_grid import here, served
from support.loopback import FEDSHIFT, environ, gone, processes

pytestmark = pytest.mark.slow
TEXT = """\
name = "routed"
[data]
limit = 600
[shift]
target = "clients"
kind = "iid"
clients = 3
[model]
name = "mlp-projected"
hidden = [8]
[method]
name = "feddrm"
[training]
rounds = 2
steps = 3
evaluate_every = 2
"""
OWN = ("average_accuracy", "worst_accuracy", "oracle_routed", "router_accuracy", "client_accuracy")


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command of `fedshift deploy`, ended with the block."""
    process = subprocess.Popen(
        [FEDSHIFT, "deploy", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=environ(),
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)


def wait_for_event(events: Path, kind: str, patience: float) -> None:
    end = time.monotonic() + patience
    while not (events.exists() and f'"event": "{kind}"' in events.read_text()):
        assert time.monotonic() < end, f"no {kind} within {patience} s"
        time.sleep(0.2)


def test_a_router_of_machines_is_that_of_one_process(tmp_path: Path) -> None:
    folder, port = tmp_path / "federation", str(free_port())
    (tmp_path / "routed.toml").write_text(TEXT)
    init = [FEDSHIFT, "deploy", "init", str(tmp_path / "routed.toml"), str(folder)]
    subprocess.run(init, check=True, env=environ(), capture_output=True)
    # Without --refit, whose messages take minutes; `flower/test_deployed_routers.py` has them.
    serve = ("server", str(folder), "--port", port, "--patience", "300")
    with ExitStack() as stack:
        for i in range(3):
            place, address = str(folder / "clients" / f"client-{i}"), f"127.0.0.1:{port}"
            stack.enter_context(running("client", place, "--server", address))
        with running(*serve) as server:
            wait_for_event(folder / "run" / "events.jsonl", "evaluation", 900)
            time.sleep(2)  # into the messages of the fits, three seconds each or more
            server.kill()
        assert not (folder / "run" / "summary.json").exists()
        assert gone(f"{folder}/server.key", 60)
        # It has the run's folder until it misses its SuperLink. Not another federation's.
        assert gone(f"--root-certificates {folder}/ca.crt", 300)
        with running(*serve, "--resume", str(folder / "run")) as server:
            output = server.communicate(timeout=1500)[0]
            assert server.returncode == 0, output
        # The whole experiment is in the federation's folder, with its cap.
        one = here((folder / "experiment.toml").read_text(), tmp_path / "here")
        there, x = folder / "run", torch.rand(50, 1, 28, 28)
        fits: tuple[Fit, ...] = ("trained", "moment")
        for fit in fits:
            a, b = (load_router(run, fit=fit) for run in (one, there))
            assert all(p.equal(q) for p, q in zip(a.route(x, 2), b.route(x, 2), strict=True)), fit
            assert a.calibration == b.calibration
            assert torch.equal(a.sizes, b.sizes)
        assert torch.equal(a.novelty(x), b.novelty(x))
        assert (one / "clients.csv").read_bytes() == (there / "clients.csv").read_bytes()
        assert {k: served(there)[k] for k in OWN} == {k: served(one)[k] for k in OWN}
        models = load_models(one)
        for i, pair in enumerate(models.served):
            (place_of_run,) = (folder / "clients" / f"client-{i}" / "models").iterdir()
            assert torch.equal(
                load_own_model(place_of_run)(x)["logits"], models.model(*pair, x)["logits"]
            )
    assert gone(str(folder)), processes(str(folder))
