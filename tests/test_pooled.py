"""Clients made on demand: the same federation, without clients in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.data import register
from fedshift.engine.backends import loop
from fedshift.engine.run import Federation, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import InputError
from fedshift.pooled import Pooled
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from support.federations import CLASSES, SIZES, make_clients, make_federation
from support.fuzz import different

STARTS = torch.tensor([0, *torch.tensor(SIZES).cumsum(0)[:-1].tolist()])


def pooled() -> Pooled:
    """The clients of the other tests, one after the other in one pool."""
    clients = make_clients()
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    return Pooled(x, y, STARTS, torch.tensor(SIZES))


def test_clients_are_those_of_the_pool() -> None:
    clients, whole = pooled(), make_clients()
    assert len(clients) == len(whole)
    for one, other in zip(clients, whole, strict=True):
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True)
        )
    assert torch.equal(clients[-1].y, whole[-1].y)
    assert [int(c.id) for c in clients[1:3]] == [1, 2]
    with pytest.raises(IndexError):
        clients[len(clients)]


def test_the_table_is_counted_at_once() -> None:
    table, right = register(pooled(), CLASSES), register(make_clients(), CLASSES)
    assert all(torch.equal(table[k], v) and table[k].dtype == v.dtype for k, v in right.items())
    overlapping = Pooled(pooled().x, pooled().y, torch.tensor([0, 5, 5]), torch.tensor([9, 0, 20]))
    assert torch.equal(
        register(overlapping, CLASSES)["labels"], register(list(overlapping), CLASSES)["labels"]
    )
    with pytest.raises(InputError, match="the pool has label 4; with 3 classes labels are 0..2"):
        register(pooled(), 3)


@pytest.mark.parametrize("stacks", [False, True])
def test_a_run_is_the_same(stacks: bool, setting: Setting) -> None:
    """Only the clients of the cohort are made, and one for the trial."""
    made: list[int] = []

    class Noting(Pooled):
        """Records the clients that are made."""

        def __getitem__(self, client: Any) -> Any:
            made.append(client)
            return super().__getitem__(client)

    data = pooled()
    clients = Noting(data.x, data.y, data.starts, data.sizes)
    federation = make_federation(setting.model)
    lazy = Federation(
        clients, federation.params, federation.buffers, register(clients, CLASSES), Seeds.of(0)
    )
    plain, other = (
        list(run(recipes.scaffold(setting), f, 2, cohort=2, backend=Stacked() if stacks else loop))
        for f in (federation, lazy)
    )
    assert different(plain[-1].server, other[-1].server) == []
    assert len(set(made)) <= 5


@pytest.mark.parametrize(
    ("starts", "sizes", "why"),
    [
        ([0, 100], [9, 26], "client 1: 26 examples from row 100 on, in a pool of 125"),
        ([-1], [2], "client 0: 2 examples from row -1 on"),
        ([0], [-2], "client 0: -2 examples"),
        ([0, 1], [2], r"sizes: give one whole number per client, \[N\]; got torch.int64 \(1,\)"),
        ([0.5], [2], "starts: give one whole number per client"),
    ],
)
def test_ranges_outside_are_refused(starts: list[int], sizes: list[int], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Pooled(pooled().x, pooled().y, torch.tensor(starts), torch.tensor(sizes))


def test_no_clients_are_refused() -> None:
    none = Pooled(pooled().x, pooled().y, torch.zeros(0).long(), torch.zeros(0).long())
    with pytest.raises(InputError, match="no clients"):
        register(none, CLASSES)
