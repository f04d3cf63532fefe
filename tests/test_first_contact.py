"""First contact: names to complete, short reprs, early checks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedshift
from fedshift import FedAvg, Federation, Local, Model, data, pals_weights, recipes, run
from fedshift.algorithms.method import Method
from fedshift.client.objectives import CrossEntropy, Proximal
from fedshift.data import ClientData, Examples, register
from fedshift.engine.backends import Job, Reply, loop
from fedshift.engine.processes.pool import Team, workers
from fedshift.errors import InputError
from fedshift.flower import __all__ as flower_names
from fedshift.pooled import Pooled
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from fedshift.server.combine import Mean
from fedshift.server.weights import Pals
from fedshift.sketch import sketch
from support.federations import CLASSES, FEATURES, TARGET, double, make_clients, make_federation


def test_the_doors_show_their_names() -> None:
    shown = dir(fedshift)
    assert set(fedshift.__all__) <= set(shown)
    assert "import_module" not in shown
    assert all(getattr(fedshift, name) is not None for name in fedshift.__all__)
    assert set(flower_names) <= set(dir(fedshift.flower))


# --------------------------------------------------------------------------- run, when called


def test_a_run_is_checked_when_it_is_called(mlp: Model) -> None:
    federation = make_federation(mlp)
    with pytest.raises(InputError, match="rounds must be a whole number"):
        run(FedAvg(mlp), federation, 1.5)  # type: ignore[arg-type]
    narrow = Model(nn.Linear(FEATURES, 3))
    with pytest.raises(InputError, match="the task has 5 classes"):
        run(FedAvg(narrow), make_federation(narrow), 1)
    with pytest.raises(InputError, match="the learning rate of round 9"):
        run(FedAvg(mlp, local=Local(lambda t: 0.85 - 0.1 * t)), federation, 9)


def test_nothing_is_trained_before_it_is_iterated(mlp: Model) -> None:
    trained: list[int] = []

    def noted(update: Any, jobs: Any) -> Iterator[Reply]:
        for reply in loop(update, jobs):
            trained.append(reply.client)
            yield reply

    rounds = run(FedAvg(mlp), make_federation(mlp), 2, backend=noted)
    assert trained == []
    assert next(rounds).t == 1
    assert sorted(trained) == [0, 1, 2, 3, 4, 5]
    assert [played.t for played in rounds] == [2]
    with pytest.raises(StopIteration):
        next(rounds)


def test_a_schedule_is_asked_for_the_rounds_that_are_left(mlp: Model) -> None:
    """A resumed run is not refused for rates of rounds that are over."""
    federation, seen = make_federation(mlp), []

    def rate(t: int) -> float:
        seen.append(t)
        return 0.1 if t > 1 else 0.2

    *_, first = run(FedAvg(mlp, local=Local(0.2)), federation, 1)
    run(FedAvg(mlp, local=Local(rate)), federation, 3, after=first)
    assert sorted(seen) == [2, 3]


def test_a_first_model_in_another_precision_is_none_of_another_network(mlp: Model) -> None:
    federation = make_federation(mlp)
    assert next(run(FedAvg(mlp), double(federation), 1)).t == 1
    turned = {k: v.T.contiguous() if v.ndim == 2 else v for k, v in federation.params.items()}
    with pytest.raises(InputError, match="has the shape"):
        run(FedAvg(mlp), replace(federation, params=turned), 1)


class Unfinished(Method):
    """A custom method without any of the functions that it has to define."""


def test_a_custom_method_is_refused_with_what_it_lacks(mlp: Model) -> None:
    method: Any = Unfinished
    with pytest.raises((InputError, TypeError), match="init"):
        run(method(), make_federation(mlp), 1)
    stranger: Any = object()
    with pytest.raises(InputError, match="algorithm is"):
        run(stranger, make_federation(mlp), 1)


class Counted(Pooled):
    """A pool of clients that counts how many were made."""

    made = 0

    def __getitem__(self, client: Any) -> Any:
        Counted.made += 1
        return super().__getitem__(client)


def test_clients_made_on_demand_are_not_gone_through() -> None:
    starts = torch.arange(1000)
    clients = Counted(torch.zeros(1003, 4), torch.arange(1003) % 3, starts, starts * 0 + 3)
    model = Model(nn.Linear(4, 3))
    federation = Federation(clients, *model.init(), register(clients, 3), Seeds.of(0))
    run(FedAvg(model), federation, 1, cohort=2)
    assert 0 < Counted.made < 10


# --------------------------------------------------------------------------- workers


def _asked(clients: tuple[ClientData, ...]) -> str:
    try:
        with workers(clients, 1):
            return "made"
    except InputError as e:
        return str(e)


@pytest.mark.few(1)
@pytest.mark.parametrize("daemon", [True, False])
def test_workers_within_another_process(daemon: bool) -> None:
    """As in a sweep with a process pool, whose processes may have no children."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    clients = make_clients()

    def tell() -> None:
        theirs.send(_asked(clients))

    process = context.Process(target=tell, daemon=daemon)
    process.start()
    assert ours.poll(30)
    answer = ours.recv()
    process.join()
    assert answer == "made" or ("daemonic" in answer and "ProcessPoolExecutor" in answer)
    assert (answer == "made") is not daemon


def test_workers_within_a_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_asked, make_clients()).result() == "made"


# --------------------------------------------------------------------------- what objects show


@pytest.fixture(scope="module")
def wide() -> dict[str, Any]:
    """The objects of a large federation."""
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)], nn.Linear(64, 345))
    model, n, k = Model(net), 200, 345
    clients = [
        ClientData(torch.randn(50, 64), torch.arange(50), torch.ones(50), torch.tensor(i))
        for i in range(n)
    ]
    params, buffers = model.init()
    table, target = register(clients, k), (1 / k,) * k
    method = FedAvg(model, CrossEntropy() + Proximal(0.1), combine=Mean(Pals(target, ess=0.5)))
    federation = Federation(clients, params, buffers, table, Seeds.of(0))
    start = fedshift.engine.run.start(method, federation)
    examples = Examples(clients[0].x, clients[0].y)
    classes = tuple(f"class {i}" for i in range(k))
    shares = torch.tensor(target, dtype=torch.float64)
    return {
        "federation": federation,
        "client": clients[0],
        "model": model,
        "method": method,
        "personal": recipes.ditto(Setting(model, target, head=("40.",))),
        "setting": Setting(model, target),
        "round": start._replace(cohort=torch.arange(n), trained=tuple(range(n))),
        "task": data.Task(tuple(clients), (examples,) * n, shares, examples, None, classes),
        "examples": examples,
        "pool": Pooled(clients[0].x, clients[0].y, torch.arange(40), torch.ones(40).long()),
        "reply": Reply(0, {"delta": params}, {}, 1),
        "job": Job(0, 1, {"params": params}, {}),
        "team": Team(clients, 2),
        "weights": pals_weights(table["labels"].numpy(), target, ess=0.9),
        "plan": Local().plan(5000, 1, torch.Generator()),
    }


def test_objects_show_themselves_on_a_screen(wide: dict[str, Any]) -> None:
    for name, made in wide.items():
        text = repr(made)
        assert text.startswith(type(made).__name__), name
        assert len(text) < 1200, name
        assert "\n" not in text, name
        assert "tensor(" not in text, name


def test_what_a_federation_says_of_itself(wide: dict[str, Any]) -> None:
    assert repr(wide["federation"]) == (
        "Federation(200 clients, 10,000 examples, 345 labels, 188,825 parameters, "
        "Seeds(split=0, init=0, cohort=0, batch=0))"
    )
    assert repr(wide["client"]) == (
        "ClientData(x=float32 [50, 64], y=int64 [50], w=float32 [50], id=0)"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor([0.1, 0.25]), "[0.1, 0.25]"),
        (torch.zeros(13), "float32 [13]"),
        (torch.zeros(2, 3, 4), "float32 [2, 3, 4]"),
        (torch.tensor(3), "3"),
        ((1, 2), "(1, 2)"),
        ((1,), "(1,)"),
        (tuple(range(20)), "(0, 1, 2, 3, 4, 5, ... 14 more)"),
        ([], "[]"),
        ({"a": {"x": torch.zeros(3)}, "b": {}}, "{a: {1 tensor, 3 numbers}, b: {0 entries}}"),
        ((0.1 / 3,) * 7, "(0.03333, 0.03333, 0.03333, 0.03333, 0.03333, 0.03333, ... 1 more)"),
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, "{2 tensors, 7 numbers}"),
        ("x" * 200, f"'{'x' * 156}..."),
    ],
)
def test_values_in_few_words(value: Any, text: str) -> None:
    assert sketch(value) == text


def test_what_is_shown_within_vmap() -> None:
    """Within vmap a tensor's numbers cannot be read."""
    seen = []

    def look(v: Tensor) -> Tensor:
        seen.append(sketch(v))
        return v

    torch.func.vmap(look)(torch.zeros(4, 2))
    assert seen == ["float32 [2]"]


def test_what_leaves_a_method_is_as_before(mlp: Model) -> None:
    """The checks do not change a run: a recipe and its fields give the same bits."""
    federation = make_federation(mlp)
    by_name = recipes.fedprox(Setting(mlp, TARGET, Local(0.1, batch=8)), mu=0.1)
    by_hand = FedAvg(mlp, CrossEntropy() + Proximal(0.1), Local(0.1, batch=8))
    *_, a = run(by_name, federation, 2)
    *_, b = run(by_hand, federation, 2)
    assert all(a.server["params"][k].equal(v) for k, v in b.server["params"].items())
    *_, c = run(replace(by_hand, objective=CrossEntropy()), federation, 2)
    assert not all(a.server["params"][k].equal(v) for k, v in c.server["params"].items())
    assert len(TARGET) == CLASSES
