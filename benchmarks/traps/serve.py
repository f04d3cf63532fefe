"""Wrong uses around wrappers, served models and empty cohorts, tried as a user would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from fedshift import FedAvg, Federation, Local, run
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.feddisk import FedDisk
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.labelsets import LabelSets
from fedshift.algorithms.scaffold import Scaffold
from fedshift.client.objectives import CrossEntropy
from fedshift.client.origin import ClientEntropy
from fedshift.data import ClientData, client_data, register
from fedshift.errors import FedshiftError, InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.experiment import record
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.task.preparing import prepare
from fedshift.model import build
from fedshift.models.dense import routed_mlp
from fedshift.recipes import Setting, feddisk, feddrm_shared_head
from fedshift.router.route import Router
from fedshift.seeds import Seeds

MODEL = build(lambda: routed_mlp((4,), (8,), 3, 3), 0)
ROUTES = 0.8 * CrossEntropy() + 0.2 * ClientEntropy()


def _clients(empty: int | None = None) -> list[ClientData]:
    source = torch.Generator().manual_seed(0)
    y = torch.arange(30) % 3
    x = [torch.randn(30, 4, generator=source) + y[:, None] for _ in range(3)]
    return [client_data(x[i][: 30 * (i != empty)], y[: 30 * (i != empty)], i) for i in range(3)]


def _federation(empty: int | None = None) -> Federation:
    clients = _clients(empty)
    return Federation(clients, *MODEL.init(), register(clients, 3), Seeds.of(0))


def _tried(use: Callable[[], str]) -> str:
    try:
        return use()
    except FedshiftError as e:
        return f"refused: {e}"
    except Exception as e:
        return f"raw: {type(e).__name__}"


def _last(method: Any, rounds: int = 2) -> Any:
    return list(run(method, _federation(), rounds))[-1]


def _setting(**given: Any) -> Setting:
    return Setting(MODEL, (0.4, 0.3, 0.3), Local(lr=0.1, epochs=1, batch=10), **given)


def trap_router_inside_ditto() -> str:
    """Ditto around FedDRM, whose router is trained, and then asked for the router."""

    def use() -> str:
        method = Ditto(feddrm_shared_head(_setting()))
        last, (first, _) = _last(method), MODEL.init()
        assert not torch.equal(last.server["params"]["router.head.bias"], first["router.head.bias"])
        try:
            Router.of(method, last.server, last.states)
        except InputError:
            return "silent: the router is trained, and is said to be untrained"
        return "right"

    return _tried(use)


def trap_router_by_scaffold() -> str:
    """SCAFFOLD with FedDRM's objective."""

    def use() -> str:
        method = FedAvg(MODEL, objective=ROUTES, extras=(Scaffold(),))
        last = _last(method)
        Router.of(method, last.server, last.states)
        return "right"

    return _tried(use)


def trap_router_inside_label_sets() -> str:
    """A router trained with label sets, on a network with a column too few."""

    def use() -> str:
        narrow = build(lambda: routed_mlp((4,), (8,), 3, 2), 0)
        method = LabelSets(FedAvg(narrow, objective=ROUTES), "holders")
        federation = _federation()
        params, buffers = narrow.init()
        ours = Federation(federation.clients, params, buffers, federation.table, Seeds.of(0))
        list(run(method, ours, 1))
        return "silent: a router for two clients was trained with three"

    return _tried(use)


def trap_ditto_around_private_label_sets() -> str:
    """Ditto around private label sets, whose head's rows travel in an order of their own."""

    def use() -> str:
        _last(Ditto(LabelSets(FedAvg(MODEL)), 1.0))
        return "silent: personal rows of the head were pulled to other labels' rows"

    return _tried(use)


def trap_fine_tuning_of_feddisk_that_has_not_begun() -> str:
    """Fine-tuning after a round in which FedDisk fits densities, and trains no model."""

    def use() -> str:
        disk: FedDisk = feddisk(
            _setting(shape=(4,)), density_rounds=1, hidden=(6,), low=-9.0, high=9.0
        )
        _last(FineTune(disk, 1))
        return "right"

    return _tried(use)


def trap_cohort_without_an_example() -> str:
    """A cohort of one client a round, of clients of which one has no example."""

    def use() -> str:
        done = 0
        try:
            for played in run(FedAvg(MODEL), _federation(empty=1), 12, cohort=1):
                done = played.t
        except InputError:
            return f"silent: the run ended by chance, after round {done}"
        return "right"

    return _tried(use)


def _kept(method: str, **options: Any) -> dict[str, torch.Tensor]:
    """model.safetensors of a small run with models of the clients' own."""
    config = validate({
        "data": {"name": "fashion-mnist-mini", "validation": 0.0, "limit": 80},
        "shift": {
            "kind": "shards", "shards_per_client": 2, "clients": 4, "target": "clients",
        },
        "model": {"name": "mlp", "hidden": [4]}, "method": {"name": method, **options},
        "training": {"rounds": 2, "steps": 2, "batch": 8, "cohort": 2, "evaluate_every": 2},
    })  # fmt: skip
    with TemporaryDirectory() as place:
        folder = Path(place, "run")
        record(folder, config, prepare(config), ignore_event)
        return load_file(folder / "model.safetensors")


def trap_heads_of_fedpac() -> str:
    """FedPAC's models, read from the run folder."""

    def use() -> str:
        has_head = any("head." in name for name in _kept("fedpac"))
        return "right" if has_head else "silent: the folder has no head of any client"

    return _tried(use)


def trap_model_of_a_client_that_did_not_tune() -> str:
    """Fine-tuning's models in the run folder, of a client that was drawn before tuning alone."""

    def use() -> str:
        tensors = _kept("fedavgft", tune_rounds=1)
        personal = [v for k, v in tensors.items() if k.endswith(".personal/head.weight")]
        alike = len(personal) > 2  # two were tuned
        return "silent: the first model lies there as what it serves" if alike else "right"

    return _tried(use)
