"""Importances of examples, types of labels, and data that a model is scored on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.data import ClientData, Examples, client_data, register
from fedshift.engine.backends import Backend, loop
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import Federation, Round, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import InputError
from fedshift.evaluation.scores import score
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from support.every_method import MAKE, Make
from support.federations import CLASSES, TARGET, Normed, make_clients, make_federation
from support.rounds import different, last

METHODS = ["fedavg", "scaffold I", "fedper", "fedas", "feddisk", "labelset_fedavg", "ditto"]


def equal(a: Round, b: Round) -> bool:
    return not different(a, b)


def strewn(clients: tuple[ClientData, ...]) -> tuple[ClientData, ...]:
    """The clients with examples of importance 0 at the start, in the middle and at the end."""

    def with_idle_examples(c: ClientData) -> ClientData:
        n = len(c.y)
        place = torch.tensor([i for i in range(n + 5) if i not in (0, 3, 4, n + 3, n + 4)])
        x, y, w = (
            torch.full((n + 5, *c.x.shape[1:]), 3.0),
            torch.zeros(n + 5).long(),
            c.w.new_zeros(n + 5),
        )
        x[place], y[place], w[place] = c.x, c.y, c.w
        return ClientData(x, y, w, c.id)

    return tuple(map(with_idle_examples, clients))


def uneven() -> tuple[ClientData, ...]:
    return tuple(c._replace(w=1.0 + torch.arange(len(c.y)) % 3) for c in make_clients())


def federation_of(model: Model, clients: tuple[ClientData, ...]) -> Federation:
    return Federation(clients, *model.init(), register(clients, CLASSES), Seeds.of(0))


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [pytest.param(MAKE[k], id=k) for k in METHODS])
def test_an_example_of_importance_0_is_left_out(make: Make, setting: Setting) -> None:
    """Bit for bit what the federation without it is, its table too."""
    algorithm, model = make(setting), setting.model
    plain = last(run(algorithm, federation_of(model, uneven()), 3, cohort=4))
    more = last(run(algorithm, federation_of(model, strewn(uneven())), 3, cohort=4))
    assert equal(plain, more)
    even = last(run(algorithm, federation_of(model, make_clients()), 3, cohort=4))
    assert not equal(plain, even)  # importances do count


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["loop", "stacked", "dense", "workers"])
def test_so_it_is_by_every_backend(kind: str) -> None:
    model = build(lambda: Mlp((8,), (10,), CLASSES), seed=1)
    algorithm = recipes.fedavg(Setting(model, TARGET, Local(batch=8)))
    results = []
    for clients in (uneven(), strewn(uneven())):
        federation = federation_of(model, clients)
        if kind == "workers":
            with workers(clients, 2) as team:  # of the very clients that were given
                results.append(last(run(algorithm, federation, 2, backend=team)))
            continue
        backend: Backend = loop if kind == "loop" else Stacked(dense=kind == "dense")
        results.append(last(run(algorithm, federation, 2, backend=backend)))
    assert equal(*results)


def test_norms_and_flower_do_not_see_it(setting: Setting) -> None:
    model = build(Normed, seed=2)
    algorithm = recipes.fedavg(Setting(model, TARGET, Local(batch=7)))
    plain, more = federation_of(model, uneven()), federation_of(model, strewn(uneven()))
    assert equal(last(run(algorithm, plain, 2)), last(run(algorithm, more, 2)))
    pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
    from fedshift.flower import Site
    from support.flower_runs import differing_tensors, on_flower

    clients, first = strewn(uneven()), (plain.params, plain.buffers)
    there = on_flower(
        algorithm, plain, 2, site=lambda i: Site(algorithm, clients[i], 0, first=first)
    )
    assert differing_tensors(last(run(algorithm, plain, 2)), there) == []


def test_clients_without_any_are_empty_ones(setting: Setting) -> None:
    clients = list(make_clients())
    clients[2] = clients[2]._replace(w=torch.zeros(len(clients[2].y)))
    federation = federation_of(setting.model, tuple(clients))
    assert [len(c.y) for c in federation.clients] == [9, 23, 0, 40, 7, 30]
    assert last(run(recipes.fedavg(setting), federation, 1)).trained == (0, 1, 3, 4, 5)


@pytest.mark.parametrize(
    "w",
    [
        torch.ones(3), torch.ones(9, 1), [1.0] * 9, torch.tensor([1.0] * 8 + [torch.nan]),
        torch.tensor([torch.inf] + [1.0] * 8), torch.tensor([1.0, -0.5] + [1.0] * 7),
        torch.ones(9).bool(), torch.ones(9).long(),
    ],
)  # fmt: skip
def test_importances_that_are_none_are_refused(w: Any, setting: Setting) -> None:
    first, *rest = make_clients()
    clients, plain = (first._replace(w=w), *rest), make_federation(setting.model)
    with pytest.raises(InputError, match=r"client 0: w"):
        register(clients, CLASSES)
    with pytest.raises(InputError, match=r"client 0: w"):
        Federation(clients, plain.params, plain.buffers, plain.table, plain.seeds)


KINDS = [torch.uint8, torch.int8, torch.int32, torch.uint16, torch.uint64]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_every_whole_type(kind: torch.dtype, mlp: Model) -> None:
    plain = make_clients()[0]
    made = client_data(plain.x, plain.y.to(kind), 0)
    assert made.y.dtype == torch.int64
    assert torch.equal(made.y, plain.y)
    one, two = (
        score(mlp, *mlp.init(), Examples(plain.x, y), CLASSES) for y in (plain.y, plain.y.to(kind))
    )
    assert torch.equal(one.correct, two.correct)
    assert one.loss == two.loss


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_data_that_cannot_be_scored_are_refused(value: float) -> None:
    x, y = make_clients()[0].x.clone(), make_clients()[0].y
    Examples(x, y)
    x[3, 1] = value
    with pytest.raises(InputError, match=r"examples: x\[3\] holds NaN or infinity; leave such"):
        Examples(x, y)


def test_examples_may_be_bytes() -> None:
    x: Tensor = torch.zeros(4, 2, dtype=torch.uint8)
    assert len(Examples(x, torch.zeros(4).long())) == 4


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_examples_are_counted_exactly_whatever_the_type_of_importances(kind: torch.dtype) -> None:
    data = client_data(torch.ones(3001, 1), torch.arange(3001) % 2, 0)
    table = register([data._replace(w=torch.ones(3001, dtype=kind))], 2)
    assert table["n"].tolist() == [3001.0]
    assert table["labels"].tolist() == [[1501.0, 1500.0]]


def test_examples_with_a_history_of_gradients_train_alike() -> None:
    model = build(lambda: Mlp((8,), (5,), CLASSES), seed=0)
    plain = make_federation(model)
    moved = tuple(c._replace(x=c.x.clone().requires_grad_() * 1) for c in plain.clients)
    federation = replace(plain, clients=moved)
    method = recipes.fedavg(Setting(model, TARGET, Local(0.1, steps=2)))
    for backend in (loop, Stacked()):
        runs = (run(method, one, 1, backend=backend) for one in (plain, federation))
        assert equal(*map(last, runs))


def test_importances_in_float64_train_alike(setting: Setting) -> None:
    """They come so from numpy. Control: other importances."""
    made = make_federation(setting.model)

    def ran(kind: torch.dtype, least: int) -> list[float]:
        clients = [
            c._replace(w=(torch.arange(len(c.y)) % 2 + least).to(kind)) for c in made.clients
        ]
        federation = replace(made, clients=clients)
        return [played.loss for played in run(recipes.fedavg(setting), federation, rounds=2)]

    assert ran(torch.float64, 1) == pytest.approx(ran(torch.float32, 1), abs=1e-6)
    assert ran(torch.float64, 1) != pytest.approx(ran(torch.float32, 2), abs=1e-6)
