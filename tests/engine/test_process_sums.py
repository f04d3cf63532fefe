"""Sums of shares: how they are added, and which parts a process sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from fedshift.engine.backends import Backend, Block, Job, Reply
from fedshift.engine.checks.gate import Asked, Gate
from fedshift.engine.checks.replies import block_of
from fedshift.engine.sums.running import RunningSums, join_blocks
from fedshift.engine.sums.summing import Terms, check_and_sum, terms, train_and_sum
from fedshift.errors import TrainingError
from fedshift.tree import Parts


def reply(client: int, *numbers: float) -> Reply:
    update = {"delta": {"w": torch.tensor(numbers)}, "report": {"id": torch.tensor(client)}}
    return Reply(client, update, {}, 1)


def block(client: int, *numbers: float) -> Block:
    return block_of(reply(client, *numbers))


def share_of(clients: Sequence[int], numbers: Sequence[float], weight: float = 0.5) -> Block:
    """The reply of another process for these clients."""
    sums = RunningSums(torch.tensor(clients), {"delta": torch.full((len(clients),), weight)})
    left = sums.add([block(i, n) for i, n in zip(clients, numbers, strict=True)])
    return join_blocks(left)._replace(sums=sums.totals)


def test_sums_are_added_at_the_end_by_client() -> None:
    """Whichever comes first: 1e16 + 1 is 1e16 in float64, so that the order shows."""
    weights = {"delta": torch.full((6,), 0.5)}
    numbers = {0: 2e16, 1: 2.0, 2: -2e16, 3: 2.0, 4: 2.0, 5: 2.0}
    shares = [share_of((2, 3), (numbers[2], numbers[3])), share_of((4, 5), (2.0, 2.0))]
    totals = []
    for order in (shares, shares[::-1]):
        sums = RunningSums(torch.arange(6), weights)
        sums.add(order)
        sums.add([block(0, numbers[0]), block(1, numbers[1])])
        totals.append(float(sums.parts()["delta"]["w"]))
    # ((1e16 + 1) + (-1e16 + 1)) + 2: the first sum loses its 1, the second's -1e16 + 1 does not.
    assert totals == [(1e16 + 1.0) + (-1e16 + 1.0) + 2.0] * 2


def test_another_form_is_refused() -> None:
    sums = RunningSums(torch.arange(4), {"delta": torch.full((4,), 0.25)})
    sums.add([block(0, 1.0, 2.0), block(1, 1.0, 2.0), share_of((2, 3), (1.0, 1.0))])
    with pytest.raises(TrainingError, match=r"clients 2, 3 sent updates with another \"delta\""):
        sums.parts()


def test_a_part_that_only_some_send_is_refused() -> None:
    """Whichever client comes first, and wherever its update was summed."""
    weights = {"delta": torch.full((6,), 0.5)}
    bare = block_of(Reply(0, {"report": {"id": torch.tensor(0)}}, {}, 1))
    sums = RunningSums(torch.arange(6), weights)
    sums.add([bare, share_of((2, 3), (1.0, 1.0))])
    with pytest.raises(TrainingError, match='client 1 sent an update with another "delta"'):
        sums.add([block(1, 1.0)])
    with pytest.raises(TrainingError, match='clients 2, 3 sent updates with another "delta"'):
        sums.parts()


def test_a_missing_answer_is_noticed_wherever_it_is_summed() -> None:
    sums = RunningSums(torch.arange(3), {"delta": torch.full((3,), 0.5)})
    taken = partial(check_and_sum, Gate(), asked=asked_of(range(3)), sums=sums)
    with pytest.raises(TrainingError, match="no answer in time"):
        taken([share_of((0, 2), (1.0, 1.0))])
    assert taken([share_of((0, 2), (1.0, 1.0)), block(1, 1.0)]).clients == (0, 1, 2)


def asked_of(clients: Sequence[int]) -> Asked:
    return Asked(1, tuple(clients), lambda i: {"params": {"w": torch.zeros(1)}})


@pytest.mark.parametrize(
    ("weights", "clients"),
    [([0.5, 0.5, 0.0, 0.0], (0, 1, 2)), ([0.25] * 4, (0, 1)), (None, (0, 1, 2))],
    ids=["a client of weight 0", "two updates are no more than their sum", "nothing is summed"],
)
def test_clients_whose_updates_are_sent_in_full(
    weights: list[float] | None, clients: tuple[int, ...]
) -> None:
    by = {} if weights is None else {"delta": torch.tensor(weights)}
    assert terms(RunningSums(torch.arange(4), by), Gate(), asked_of(range(4)), clients) is None


def test_each_client_has_its_own_weight() -> None:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    sums = RunningSums(torch.tensor([3, 5, 8, 9]), {"delta": weights})
    agreed = terms(sums, Gate(), asked_of([3]), (5, 8, 9))
    assert agreed is not None
    assert agreed.weights == {"delta": (0.2, 0.3, 0.4)}


def two_parts(client: int, number: float) -> Reply:
    update = {"delta": {"w": torch.tensor([number])}, "control": {"w": torch.tensor([-number])}}
    return Reply(client, update, {}, 1)


def jobs_of(clients: Sequence[int]) -> list[Job]:
    message = {"params": {"w": torch.zeros(1)}, "control": {"w": torch.zeros(1)}}
    return [Job(i, message, {}, None, {}, 1) for i in clients]  # type: ignore[arg-type]


def backend_of(came: Sequence[Reply]) -> Backend:
    """A backend that returns these replies."""
    return lambda update, jobs: iter(came)


def untrained(*args: Any) -> tuple[Parts, Parts]:
    raise AssertionError("not called")


def test_each_part_has_its_own_weights() -> None:
    """SCAFFOLD's controls, for example, have other weights than the changes."""
    weights = {
        "delta": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
        "control": torch.full((4,), 0.25, dtype=torch.float64),
    }
    agreed = terms(RunningSums(torch.arange(4), weights), Gate(), asked_of(range(4)), (1, 2, 3))
    assert agreed is not None
    came = backend_of([two_parts(i, 2.0**i) for i in (1, 2, 3)])
    (share,) = train_and_sum(came, untrained, jobs_of((1, 2, 3)), agreed)
    assert share.clients == (1, 2, 3)
    sums = {part: float(tree["w"]) for part, tree in share.sums.items()}
    assert sums == {
        "delta": pytest.approx(0.2 * 2 + 0.3 * 4 + 0.4 * 8, abs=1e-15),
        "control": pytest.approx(-0.25 * (2 + 4 + 8), abs=1e-15),
    }
    assert share.updates == {}


def test_a_weight_of_0_for_one_part_is_enough() -> None:
    weights = {"delta": torch.full((3,), 0.5), "control": torch.tensor([0.5, 0.0, 0.5])}
    sums = RunningSums(torch.arange(3), weights)
    assert terms(sums, Gate(), asked_of(range(3)), (0, 1, 2)) is None


def test_parts_that_are_not_the_methods_are_not_let_through() -> None:
    """Where the whole share sends them, only the method's list of parts shows that they are odd."""
    numbers = {"delta": (0.5, 0.25, 0.25)}
    came = [reply(i, 1.0) for i in range(3)]
    came = [r._replace(update={**r.update, "extra": {"w": torch.ones(1)}}) for r in came]
    allowed = frozenset({"delta", "report"})
    for parts, some in ((allowed, False), (allowed | {"extra"}, True)):
        agreed = Terms(Gate(), parts, numbers)
        first, *_ = train_and_sum(backend_of(came), untrained, jobs_of(range(3)), agreed)
        assert bool(first.sums) == some


def test_parts_that_no_client_sends_are_not_summed() -> None:
    """Replies stay as they are, and so does their order."""
    agreed = Terms(Gate(), frozenset(), {"control": (0.5, 0.25, 0.25)})
    came = [reply(i, 1.0) for i in (2, 0, 1)]
    left = train_and_sum(backend_of(came), untrained, jobs_of(range(3)), agreed)
    assert [one.clients for one in left] == [(2,), (0,), (1,)]
    assert all(one.updates.keys() == {"delta", "report"} and not one.sums for one in left)
