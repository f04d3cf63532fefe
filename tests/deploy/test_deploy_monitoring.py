"""/healthz, /readyz and /metrics, from events and connected clients."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (extra ops)")
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fedshift.errors import FedshiftError, InputError
from fedshift_deploy.federation import Link
from fedshift_deploy.metrics import ServerMetrics
from fedshift_deploy.monitoring import SILENT, Presence, answering, monitored, open_port
from fedshift_deploy.place import make_place
from fedshift_deploy.processes import free_port

CLIENTS = ("client-0", "client-1", "client-2")
ROUND: dict[str, Any] = {
    "event": "round", "time": 1000.5, "run": "r", "round": 4, "rounds": 9, "train_loss": 0.5,
    "clients": [0, 2], "seconds": 7.0, "bytes_down": 300, "bytes_up": 200,
}  # fmt: skip


def numbers(registry: CollectorRegistry) -> dict[str, float]:
    """All samples by name and labels, as Prometheus reads them."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        s.name + "".join(f" {v}" for v in s.labels.values()): s.value
        for family in families
        for s in family.samples
    }


def test_what_events_become() -> None:
    metrics = ServerMetrics(CLIENTS, 5e9)
    fresh = numbers(metrics.registry)
    assert fresh["fedshift_accuracy_ratio"] != fresh["fedshift_accuracy_ratio"]  # NaN, and not 0
    assert fresh["fedshift_dropouts_total client-1 lost"] == 0
    metrics({"event": "start", "run": "r", "rounds": 9, "after": 3})
    dropped = {"client": 1, "reason": "secret \n words", "kind": "timeout"}
    metrics({"event": "dropped", "round": 4, **dropped})
    metrics({"event": "unscored", "round": 4, "client": 2, "kind": "lost", "reason": "secret"})
    metrics(ROUND | {"dropped": [dropped, {"client": 0, "reason": "unusable"}], "gap": 0.25})
    metrics({"event": "evaluation", "round": 4, "ess": "inf", "target_accuracy": 0.75, "gap": 0.1})
    metrics.connect({"client-2"})
    seen = numbers(metrics.registry)
    expected = {
        "round": 4, "rounds_planned": 9, "round_end_timestamp_seconds": 1000.5,
        "round_seconds_count": 1, "round_seconds_sum": 7, "rounds_skipped_total": 0,
        # The event of the round names a drop-out again: it is one.
        "dropouts_total client-1 timeout": 1, "dropouts_total client-0 other": 1,
        "missing_scores_total client-2 lost": 1, "missing_scores_total client-1 timeout": 0,
        "message_bytes_total sent": 300, "message_bytes_total received": 200, "train_loss": 0.5,
        "gap": 0.1, "ess_examples": float("inf"), "accuracy_ratio": 0.75, "clients_expected": 3,
        "client_connected client-1": 0, "client_connected client-2": 1,
        "certificate_end_timestamp_seconds": 5e9,
    }  # fmt: skip
    assert {name: seen[f"fedshift_{name}"] for name in expected} == expected
    assert sum(v for k, v in seen.items() if "dropouts" in k) == 2
    # No second series of when a counter was made; the control is the page as it is served.
    served = generate_latest(metrics.registry).decode()
    assert "fedshift_dropouts_total{" in served
    assert "_created" not in served


def test_a_clients_words_and_data_are_not_served() -> None:
    metrics = ServerMetrics(CLIENTS, 5e9)
    mine = {"kind": "my data", "reason": "7 patients", "client": 0, "n": 7, "label_counts": [7]}
    metrics({"event": "dropped", "round": 1, **mine})
    metrics(ROUND | {"weights": [0.123, 0.877], "accuracy": 0.321})
    text = generate_latest(metrics.registry).decode()
    for word in ("my data", "patients", "0.123", "0.321", "label_counts"):
        assert word not in text
    # Whatever comes, there are no more series than clients times kinds.
    assert text.count("fedshift_dropouts_total{") == 3 * 6


@contextlib.contextmanager
def serving(presence: Presence) -> Iterator[str]:
    checks = {"/healthz": presence.healthy, "/readyz": presence.ready}
    with open_port(str(free_port())) as port, answering(port, checks, CollectorRegistry()):
        yield f"http://127.0.0.1:{port.getsockname()[1]}"


def answer(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def test_healthy_and_ready() -> None:
    there: list[frozenset[str] | FedshiftError] = [frozenset({"client-0", "client-2"})]

    def ask() -> frozenset[str]:
        if isinstance(there[0], FedshiftError):
            raise there[0]
        return there[0]

    presence = Presence(CLIENTS, ask, lambda _: None, required=3)
    with serving(presence) as url:
        presence.look()
        assert answer(f"{url}/healthz") == (200, "ok\n")
        assert answer(f"{url}/readyz") == (
            503, "2 of 3 clients are connected, and 3 are needed; missing: client-1\n",
        )  # fmt: skip
        presence.required = 2
        assert answer(f"{url}/readyz") == (200, "ok\n")
        # A SuperLink that is silent for a moment is busy; for long, it is ill.
        there[0] = FedshiftError("no answer")
        presence.look()
        assert answer(f"{url}/readyz")[0] == 200
        presence.answered -= SILENT
        for path in ("healthz", "readyz"):
            code, why = answer(f"{url}/{path}")
            assert (code, why.startswith("the SuperLink has not answered for 9")) == (503, True)
        assert answer(f"{url}/metrics")[0] == 200
        assert answer(f"{url}/else")[0] == 404
    with pytest.raises(OSError):
        answer(f"{url}/healthz")


def test_a_server_answers_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before its SuperLink listens, and until the SuperLink ends."""
    make_place(tmp_path, "", 2, ["localhost"])
    both = frozenset({"client-0", "client-1"})
    monkeypatch.setattr("fedshift_deploy.monitoring.connected", lambda link: both)
    port = free_port()
    url, link = f"http://127.0.0.1:{port}", Link(tmp_path, {}, tmp_path / "log")
    with monitored(str(port), tmp_path, lambda event: None) as monitor:
        assert answer(f"{url}/healthz") == (200, "ok\n")
        assert answer(f"{url}/readyz") == (503, "starting\n")
        with monitor.beside(link):
            stop = time.monotonic() + 10
            while (seen := answer(f"{url}/readyz"))[0] != 200 and time.monotonic() < stop:
                assert "starting" not in seen[1]
            assert (seen, answer(f"{url}/healthz")) == ((200, "ok\n"),) * 2
        with pytest.raises(OSError):
            answer(f"{url}/healthz")


def test_ports_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "f"
    make_place(folder, "", 1, ["localhost"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for wrong, why in {
            address: rf"--metrics {address} cannot be opened: .*; give another",
            "fed:x": r'--metrics "fed:x": write it as host:port',
        }.items():
            with (
                pytest.raises(InputError, match=why),
                monitored(wrong, folder, lambda event: None),
            ):
                pass
    monkeypatch.setattr("fedshift_deploy.monitoring.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"prometheus_client, which is not .*'fedshift\[ops\]'"):
        open_port(str(free_port()))


RUBBISH = """
import socket, sys, uvicorn
from prometheus_client import CollectorRegistry
from fedshift_deploy.monitoring import answering

def config(*given, **settings):
    return made(*given, **settings | ({"log_level": None} if "control" in sys.argv else {}))

made, uvicorn.Config = uvicorn.Config, config
port = socket.create_server(("127.0.0.1", 0))
with answering(port, {}, CollectorRegistry()):
    for sent in (bytes.fromhex("16030100c8010000c40303"), b"rubbish\\r\\n\\r\\n"):
        with socket.create_connection(port.getsockname(), 10) as s:
            s.sendall(sent)
            print(s.recv(12).decode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["ours", "control"])
def test_malformed_requests_leave_no_lines_in_the_log(level: str) -> None:
    """uvicorn's own lines are no JSON. The control: with uvicorn's own log level."""
    done = subprocess.run(
        [sys.executable, "-c", RUBBISH, level], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["HTTP/1.1 400"] * 2
    assert done.stderr == ("" if level == "ours" else "Invalid HTTP request received.\n" * 2)


def test_only_this_machine_unless_a_host_is_given() -> None:
    with open_port(str(free_port())) as port:
        assert port.getsockname()[0] == "127.0.0.1"
