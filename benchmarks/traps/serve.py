"""What wrapped methods can do, what a run folder keeps of its clients, rounds of empty clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from fedshift import FedAvg, Federation, Local, Model, recipes, run
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.labelsets import LabelSets
from fedshift.algorithms.local_only import LocalOnly
from fedshift.algorithms.scaffold import Scaffold
from fedshift.client.objectives import CrossEntropy
from fedshift.client.origin import ClientEntropy
from fedshift.data import client_data, register
from fedshift.engine.rounds import Round
from fedshift.errors import FedshiftError
from fedshift.experiments.folder import record
from fedshift.experiments.load import validate
from fedshift.experiments.routers import load_router
from fedshift.experiments.task import prepare
from fedshift.model import build
from fedshift.models.routed import Routed, projection
from fedshift.recipes import Setting
from fedshift.router.route import Router
from fedshift.seeds import Seeds

ROUTES = 0.5 * CrossEntropy() + 0.5 * ClientEntropy()
LOCAL = Local(lr=0.1, epochs=None, steps=5, batch=16)
SIZES = (30, 30, 30)


def _network(clients: int = len(SIZES)) -> Model:
    stages = (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU()),
        lambda: projection(8, 6),
    )
    return build(lambda: Routed(stages, 6, 3, clients, shared=1), 0)


def _federation(model: Model, sizes: tuple[int, ...] = SIZES) -> Federation:
    source = torch.Generator().manual_seed(0)
    data = tuple(
        client_data(torch.randn(n, 4, generator=source) + 2 * i, torch.arange(n) % 3, i)
        for i, n in enumerate(sizes)
    )
    return Federation(data, *model.init(), register(data, 3), Seeds.of(0))


def _last(method: Any, model: Model, rounds: int = 3, **how: Any) -> Round:
    return list(run(method, _federation(model), rounds, **how))[-1]


def _moved(played: Round, model: Model) -> bool:
    first, now = model.init()[0], played.server["params"]
    return any(not torch.equal(v, first[k]) for k, v in now.items() if k.startswith("router."))


def _router(wrap: Callable[[FedAvg], Any]) -> str:
    """Whether the router that such a method has trained can be asked."""
    model = _network()
    method = wrap(FedAvg(model, objective=ROUTES, local=LOCAL))
    played = _last(method, model)
    try:
        Router.of(method, played.server, played.states)
    except FedshiftError as e:
        trained = _moved(played, model) and "has trained no router" in str(e)
        return (
            "silent: said to have trained no router, which it has" if trained else f"refused: {e}"
        )
    return "right"


def trap_router_inside_ditto() -> str:
    """Router.of(Ditto(FedAvg with ClientEntropy)): it did train a router."""
    return _router(lambda m: Ditto(m, 1.0, LOCAL))


def trap_router_inside_label_sets() -> str:
    """Router.of(LabelSets(FedAvg with ClientEntropy)): it did train a router."""
    return _router(lambda m: LabelSets(m, "public"))


def _answer(use: Callable[[], str]) -> str:
    """What a use comes to: its own words, or the refusal."""
    try:
        return use()
    except FedshiftError as e:
        return f"refused: {e}"


def trap_router_of_scaffold() -> str:
    """Scaffold(model, objective=... + ClientEntropy()), to train a router as FedAvg does."""
    model = _network()
    played = _last(Scaffold(model, objective=ROUTES, local=LOCAL), model)
    return "right" if _moved(played, model) else "silent: the router stayed as it was"


def trap_router_of_local_only() -> str:
    """LocalOnly(model, ClientEntropy()): a client alone cannot learn to tell clients apart."""

    def use() -> str:
        model = _network()
        played = _last(LocalOnly(model, ROUTES, LOCAL), model)
        return f"silent: trained, loss {played.loss:.2f}"

    return _answer(use)


def trap_ditto_around_feddisk() -> str:
    """Ditto(FedDisk): personal models beside rounds that train no model at first."""
    model = _network()
    setting = Setting(model, (1 / 3,) * 3, LOCAL, shape=(4,))
    disk = recipes.feddisk(setting, density_rounds=1, hidden=(6,), low=-8.0, high=12.0)
    method = Ditto(disk, 1.0, LOCAL)
    played = _last(method, model, 4)
    own = [
        method.at(4).model_for(played.server, played.states[i])[0]["head.weight"] for i in (0, 1)
    ]
    return "silent: both serve one model" if torch.equal(*own) else "right"


def trap_an_empty_cohort_of_a_plain_mean() -> str:
    """fedavg_uniform where a round draws one client alone, and that one has no example."""
    model = _network()
    method = recipes.fedavg_uniform(Setting(model, (1 / 3,) * 3, LOCAL))
    played = list(run(method, _federation(model, (30, 0, 30)), 6, cohort=1))
    odd = [r for r in played if r.cohort.tolist() == [1] and not r.skipped]
    return f"silent: said to have trained, with a loss of {odd[0].loss}" if odd else "right"


@contextmanager
def _folder(method: str, **options: Any) -> Iterator[tuple[Path, Any]]:
    """A small run's folder, in which a client or two never took part, and its network."""
    config = validate({
        "data": {"name": "fashion-mnist-mini", "limit": 160, "validation": 0.2},
        "shift": {"kind": "shards", "shards_per_client": 2, "clients": 8, "target": "clients"},
        "model": {"name": "mlp-projected", "hidden": [8]},
        "training": {"rounds": 2, "steps": 4, "batch": 8, "cohort": 3, "evaluate_every": 2},
        "method": {"name": method, **options},
    })  # fmt: skip
    prepared = prepare(config)
    with TemporaryDirectory() as place:
        folder = Path(place, "run")
        record(folder, config, prepared, lambda event: None)
        yield folder, prepared


def _drawn(folder: Path) -> set[int]:
    """Who took part."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    rounds = [e for e in map(json.loads, lines) if e["event"] == "round"]
    return {i for e in rounds for i in e["clients"]}


def trap_heads_of_fedpac() -> str:
    """The heads that FedPAC's clients serve, read from model.safetensors."""
    with _folder("fedpac") as (folder, _):
        drawn = _drawn(folder)
        names = [k for k in load_file(folder / "model.safetensors") if k.endswith("head.weight")]
    missing = [i for i in drawn if not any(k.startswith(f"client{i}.") for k in names)]
    return f"silent: no head of {len(missing)} of {len(drawn)} clients" if missing else "right"


def trap_models_of_ditto() -> str:
    """The models that all of Ditto's clients serve, also who never took part, from the file."""
    with _folder("ditto") as (folder, prepared):
        first = prepared.model.init()[0]["head.weight"]
        tensors = load_file(folder / "model.safetensors")
        kept = any(torch.equal(v, first) for k, v in tensors.items() if k.endswith("head.weight"))
    return "right" if kept else "silent: what clients that never took part serve is missing"


def trap_router_of_shared_head() -> str:
    """load_router of a run of feddrm_shared_head in which some clients never took part."""
    with _folder("feddrm_shared_head") as (folder, _):
        drawn, clients = _drawn(folder), set(load_router(folder).clients)
    return "right" if clients == drawn else f"silent: routes to {sorted(clients - drawn)}, too"
