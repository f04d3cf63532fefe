"""Numbers are checked in their sum and forms once; no bad reply passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.client.local import Local, plan_all, plan_many
from fedshift.data import Plan
from fedshift.engine.backends import Block, Reply
from fedshift.engine.checks.gate import Asked, Gate
from fedshift.engine.checks.replies import block_of
from fedshift.engine.sums.running import RunningSums
from fedshift.engine.sums.summing import check_and_sum
from fedshift.errors import DivergedError, TrainingError
from fedshift.tree import stack
from support.federations import make_clients

CLIENTS = 6


def reply(client: int, number: float = 1.0, claimed: int | None = None) -> Reply:
    sent_id = client if claimed is None else claimed
    report = {"id": torch.tensor(sent_id), "loss": torch.tensor(0.5)}
    return Reply(client, {"delta": {"w": torch.tensor([0.5, number])}, "report": report}, {}, 1)


def each(part: str, change: Callable[[Tensor], Any]) -> Callable[[Reply], Reply]:
    return lambda r: r._replace(
        update={**r.update, part: {k: change(v) for k, v in r.update[part].items()}}
    )


def let(came: Sequence[Reply | Block], weights: Tensor | None = None) -> RunningSums:
    """The sums after these replies, three at a time."""
    by = torch.full((CLIENTS,), 0.25, dtype=torch.float64) if weights is None else weights
    sums = RunningSums(torch.arange(CLIENTS), {"delta": by, "own": by})
    question = Asked(1, tuple(range(CLIENTS)), lambda i: {"params": {"w": torch.zeros(2)}})
    check_and_sum(Gate(), map(block_of, came), question, sums, some=3)
    return sums


def of_its_own(change: Callable[[Tensor], Tensor], r: Reply) -> Reply:
    """The reply with a part whose form nothing in the message determines."""
    update = {"own": {"w": change(r.update["delta"]["w"])}, "report": r.update["report"]}
    return r._replace(update=update)


def replies(**odd: Reply) -> list[Reply]:
    """The replies of all clients; `c2=...` replaces client 2's."""
    return [odd.get(f"c{i}", reply(i)) for i in range(CLIENTS)]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("client", [0, 2, 5])
def test_what_is_not_finite_is_found_in_the_sum(number: float, client: int) -> None:
    message = f'client {client} sent non-finite numbers in "delta/w"'
    with pytest.raises(DivergedError, match=message):
        let(replies(**{f"c{client}": reply(client, number)}))


def test_honest_sums() -> None:
    """The control."""
    assert let(replies()).parts()["delta"]["w"].tolist() == [0.75, 1.5]


def test_infinities_that_cancel_are_found() -> None:
    with pytest.raises(DivergedError, match="client 1 sent non-finite"):
        let(replies(c1=reply(1, torch.inf), c2=reply(2, -torch.inf)))


def test_clients_left_out_of_a_sum_are_checked() -> None:
    """0 * NaN is never added, so that no sum would reveal it."""
    weights = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    with pytest.raises(DivergedError, match="client 1 sent non-finite"):
        let(replies(c1=reply(1, torch.nan)), weights)
    assert let(replies(), weights).parts()["delta"]["w"].tolist() == [0.5, 1.0]


def together(came: list[Reply]) -> Block:
    """The replies as one block."""
    updates = stack([r.update for r in came])
    return Block(tuple(r.client for r in came), updates, {}, came[0].t)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("left_out", [(), (1,)])
def test_a_block_is_checked_as_its_clients_are(number: float, left_out: tuple[int, ...]) -> None:
    """A client that sums leave out is checked, too. The second bad client is not named."""
    weights = torch.tensor([0.0 if i in left_out else 0.25 for i in range(CLIENTS)]).double()
    came = replies(c1=reply(1, number), c4=reply(4, number))
    for blocks in ([together(came)], [together(came[3:]), together(came[:3])]):
        with pytest.raises(DivergedError, match='client 1 sent non-finite numbers in "delta/w"'):
            let(blocks, weights)
    alone = let(replies(), weights).parts()["delta"]["w"]
    assert torch.equal(let([together(replies())], weights).parts()["delta"]["w"], alone)
    large = [of_its_own(lambda v: v.double() * 1.7e308, reply(i)) for i in range(CLIENTS)]
    assert not let([together(large)], torch.ones(CLIENTS).double()).finite()  # no reply is to blame


def test_parts_that_are_not_summed_are_checked() -> None:
    nan = each("report", lambda v: v * torch.nan if v.is_floating_point() else v)
    with pytest.raises(DivergedError, match='client 4 sent non-finite numbers in "report/loss"'):
        let(replies(c4=nan(reply(4))))
    with_nan = reply(4)._replace(changed={"personal": {"w": torch.tensor([torch.nan, 1.0])}})
    with pytest.raises(DivergedError, match='would keep non-finite numbers in "personal/w"'):
        let(replies(c4=with_nan))


def test_the_first_client_is_named() -> None:
    """Although its numbers are checked later than the second client's form."""
    with pytest.raises(DivergedError, match="client 0 sent non-finite"):
        let(replies(c0=reply(0, torch.nan), c1=reply(1, claimed=4)))
    with pytest.raises(TrainingError, match="client 0 says that it is client 4"):
        let(replies(c0=reply(0, claimed=4), c1=reply(1, torch.nan)))


def test_bad_numbers_are_reported_before_a_form_that_differs() -> None:
    """The second three clients agree on a form that differs from the first three's."""
    came = [of_its_own(lambda v, i=i: v.repeat(1 + i // 3), reply(i)) for i in range(CLIENTS)]
    with pytest.raises(TrainingError, match='client 3 sent an update with another "own"'):
        let(came)
    came[4] = of_its_own(lambda v: v.repeat(2), reply(4, torch.nan))
    with pytest.raises(DivergedError, match="client 4 sent non-finite"):
        let(came)


def test_a_sum_may_overflow() -> None:
    """No reply is to blame; the server's step is checked later."""
    came = [of_its_own(lambda v: v.double() * 1.7e308, reply(i)) for i in range(CLIENTS)]
    assert not let(came, torch.ones(CLIENTS).double()).finite()
    assert let(came, torch.eye(CLIENTS).double()[0]).finite()  # the control


def test_no_sum_reveals_bad_complex_numbers() -> None:
    nan = lambda v: torch.complex(v, torch.full_like(v, torch.nan))  # noqa: E731
    with pytest.raises(TrainingError, match="non-finite numbers"):
        let([of_its_own(nan, reply(i)) for i in range(CLIENTS)])


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.clone().requires_grad_(),
        torch.nn.Parameter,
        lambda v: v.to_sparse(),
        lambda v: v.to("meta"),
        lambda v: v.numpy(),
        lambda v: 1.0,
        lambda v: v[None],
        lambda v: v.double(),
    ],
)
def test_no_odd_tensor_looks_plain(change: Callable[[Tensor], Any]) -> None:
    plain, odd = block_of(reply(0)), block_of(each("delta", change)(reply(1)))
    assert plain.odd == ""
    assert block_of(reply(1)).look == plain.look  # the control
    assert odd.look != plain.look


@pytest.mark.parametrize(
    "update", [None, {}, {"delta": None}, {"delta": {}}, {"delta": {"v": torch.ones(2)}}]
)
def test_other_names_do_not_look_alike(update: Any) -> None:
    plain = Reply(0, {"delta": {"w": torch.ones(2)}}, {})
    assert block_of(Reply(0, update, {})).look != block_of(plain).look


def equal(a: Plan, b: Plan) -> bool:
    same = all(torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    return same and a[3:] == b[3:]


def test_plans_drawn_together_are_each_clients_own() -> None:
    """For equal and unequal sizes, whole and partial batches, and clients without examples."""
    phases = {"a": Local(batch=4), "b": Local(steps=3, batch=4), "c": Local(epochs=2, batch=3)}
    clients = list(enumerate(make_clients(0, (8, 5, 8, 5, 8, 16, 16))))
    together = plan_many(phases, clients, 3, 9)
    for (client, data), plans in zip(clients, together, strict=True):
        alone = plan_all(phases, data, 3, 9, client)
        assert all(equal(plans[name], alone[name]) for name in phases)
    assert not equal(together[0]["a"], together[2]["a"])  # the control


@pytest.mark.parametrize("sizes", [(8, 8), (8, 5)], ids=["counted at once", "one by one"])
def test_examples_of_importance_0_are_not_drawn(sizes: tuple[int, int]) -> None:
    """A client's batches are of the first n of its examples, n those that count."""
    first, other = make_clients(0, sizes)
    first = first._replace(w=torch.tensor([1.0] * 6 + [0.0] * 2))
    plans = plan_many({"a": Local(batch=4)}, [(0, first), (1, other)], 1, 0)
    for plan, n in ((plans[0]["a"], 6), (plans[1]["a"], sizes[1])):
        assert plan.sizes is not None
        assert sum(plan.sizes) == n
        drawn = [
            row for rows, size in zip(plan.rows, plan.sizes, strict=True) for row in rows[:size]
        ]
        assert sorted(map(int, drawn)) == list(range(n))
