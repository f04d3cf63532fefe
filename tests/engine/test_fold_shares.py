"""Sums of shares by themselves: how they enter a fold, and what a process is told to sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from fedshift.engine.backends import Backend, Job, Reply, loop
from fedshift.engine.checks.gate import Asked, Gate
from fedshift.engine.sums.running import Fold, Share
from fedshift.engine.sums.summing import Books, Terms, in_turn, summed, summing
from fedshift.errors import TrainingError
from fedshift.tree import Parts


def reply(client: int, *numbers: float) -> Reply:
    update = {"delta": {"w": torch.tensor(numbers)}, "report": {"id": torch.tensor(client)}}
    return Reply(client, update, {}, 1)


def share_of(clients: Sequence[int], numbers: Sequence[float], weight: float = 0.5) -> Share:
    fold = Fold(torch.tensor(clients), {"delta": torch.full((len(clients),), weight)})
    fold.take([reply(i, n) for i, n in zip(clients, numbers, strict=True)])
    return fold.share()


def test_sums_are_added_at_the_end_by_client() -> None:
    """Whichever comes first: 1e16 + 1 is 1e16 in float64, so that the order shows."""
    weights = {"delta": torch.full((6,), 0.5)}
    numbers = {0: 2e16, 1: 2.0, 2: -2e16, 3: 2.0, 4: 2.0, 5: 2.0}
    shares = [share_of((2, 3), (numbers[2], numbers[3])), share_of((4, 5), (2.0, 2.0))]
    found = []
    for order in (shares, shares[::-1]):
        fold = Fold(torch.arange(6), weights)
        for share in order:
            fold.enter(share)
        fold.take([reply(0, numbers[0]), reply(1, numbers[1])])
        found.append(float(fold.parts()["delta"]["w"]))
    # ((1e16 + 1) + (-1e16 + 1)) + 2: the first sum loses its 1, the second's -1e16 + 1 does not.
    assert found == [(1e16 + 1.0) + (-1e16 + 1.0) + 2.0] * 2


def test_forms_of_what_was_summed_hold_zeros() -> None:
    """Their numbers pass any gate; those of new memory would be whatever it held."""
    fold = Fold(torch.arange(4), {"delta": torch.full((4,), 0.25)})
    fold.enter(share_of((2, 3), (1.0, 5.0)))
    form = fold.elsewhere[3]["delta"]["w"]
    assert torch.equal(form, torch.zeros(1))
    limited = Gate(max_norm=1e-9).admit(
        [Reply(3, {**bare(3).update, **fold.elsewhere[3]}, {}, 1)], asked_of([3])
    )
    assert limited.bad == ()


def test_another_form_is_refused() -> None:
    fold = Fold(torch.arange(4), {"delta": torch.full((4,), 0.25)})
    fold.take([reply(0, 1.0, 2.0), reply(1, 1.0, 2.0)])
    with pytest.raises(TrainingError, match=r"clients 2, 3 sent updates with another \"delta\""):
        fold.enter(share_of((2, 3), (1.0, 1.0)))


def test_a_part_that_only_some_send_is_refused() -> None:
    """Whoever comes first, and whether it was summed here or elsewhere."""
    weights = {"delta": torch.full((6,), 0.5)}
    bare = Reply(0, {"report": {"id": torch.tensor(0)}}, {}, 1)
    fold = Fold(torch.arange(6), weights)
    fold.take([bare])
    with pytest.raises(TrainingError, match='client 1 sent an update with another "delta"'):
        fold.take([reply(1, 1.0)])
    with pytest.raises(TrainingError, match='clients 2, 3 sent an update with another "delta"'):
        fold.enter(share_of((2, 3), (1.0, 1.0)))
    other = Fold(torch.arange(6), weights)
    other.enter(share_of((2, 3), (1.0, 1.0)))
    with pytest.raises(TrainingError, match='client 0 sent an update with another "delta"'):
        other.take([bare])


def bare(client: int) -> Reply:
    """What is left of a reply whose numbers were summed where it was trained."""
    return Reply(client, {"report": {"id": torch.tensor(client)}}, {}, 1)


def test_who_does_not_answer_is_missed_whoever_summed() -> None:
    fold = Fold(torch.arange(3), {"delta": torch.full((3,), 0.5)})
    fold.enter(share_of((0, 1, 2), (1.0, 1.0, 1.0)))
    taken = partial(in_turn, Gate(), asked=asked_of(range(3)), fold=fold)
    with pytest.raises(TrainingError, match="no answer in time"):
        taken([bare(0), bare(1)])
    assert [r.client for r in taken([bare(2), bare(0), bare(1)]).good] == [0, 1, 2]


def asked_of(clients: Sequence[int]) -> Asked:
    return Asked(1, tuple(clients), lambda i: {"params": {"w": torch.zeros(1)}})


@pytest.mark.parametrize(
    ("weights", "clients"),
    [([0.5, 0.5, 0.0, 0.0], (0, 1, 2)), ([0.25] * 4, (0, 1)), (None, (0, 1, 2))],
    ids=["a client of weight 0", "two updates are no more than their sum", "nothing is summed"],
)
def test_when_updates_travel(weights: list[float] | None, clients: tuple[int, ...]) -> None:
    by = {} if weights is None else {"delta": torch.tensor(weights)}
    books = Books(Fold(torch.arange(4), by), Gate(), asked_of(range(4)))
    assert books.terms(clients) is None


def test_each_client_has_its_own_weight() -> None:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    books = Books(Fold(torch.tensor([3, 5, 8, 9]), {"delta": weights}), Gate(), asked_of([3]))
    terms = books.terms((5, 8, 9))
    assert terms is not None
    assert terms.weights == {"delta": (0.2, 0.3, 0.4)}


def two_parts(client: int, number: float) -> Reply:
    update = {"delta": {"w": torch.tensor([number])}, "control": {"w": torch.tensor([-number])}}
    return Reply(client, update, {}, 1)


def jobs_of(clients: Sequence[int]) -> list[Job]:
    message = {"params": {"w": torch.zeros(1)}, "control": {"w": torch.zeros(1)}}
    return [Job(i, message, {}, None, {}, 1) for i in clients]  # type: ignore[arg-type]


def given(came: Sequence[Reply]) -> Backend:
    """A backend that has these replies."""
    return lambda update, jobs: iter(came)


def nobody(*given: Any) -> tuple[Parts, Parts]:
    raise AssertionError("not called")


def test_each_part_has_its_own_weights() -> None:
    """As SCAFFOLD's controls, whose weights are not those of the changes."""
    weights = {
        "delta": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
        "control": torch.full((4,), 0.25, dtype=torch.float64),
    }
    books = Books(Fold(torch.arange(4), weights), Gate(), asked_of(range(4)))
    terms = books.terms((1, 2, 3))
    assert terms is not None
    came = given([two_parts(i, 2.0**i) for i in (1, 2, 3)])
    left, share = summed(came, nobody, jobs_of((1, 2, 3)), terms)
    assert share is not None
    assert share.clients == (1, 2, 3)
    found = {part: float(tree["w"]) for part, tree in share.totals.items()}
    assert found == {
        "delta": pytest.approx(0.2 * 2 + 0.3 * 4 + 0.4 * 8, abs=1e-15),
        "control": pytest.approx(-0.25 * (2 + 4 + 8), abs=1e-15),
    }
    assert [one[1] for one in left] == [{}, {}, {}]


def test_a_weight_of_0_for_one_part_is_enough() -> None:
    weights = {"delta": torch.full((3,), 0.5), "control": torch.tensor([0.5, 0.0, 0.5])}
    books = Books(Fold(torch.arange(3), weights), Gate(), asked_of(range(3)))
    assert books.terms((0, 1, 2)) is None


def test_parts_that_are_not_the_methods_are_not_let_through() -> None:
    """Where the whole share sends them, only the method's own parts tell."""
    numbers = {"delta": (0.5, 0.25, 0.25)}
    came = [reply(i, 1.0) for i in range(3)]
    came = [r._replace(update={**r.update, "extra": {"w": torch.ones(1)}}) for r in came]
    known = frozenset({"delta", "report"})
    for parts, some in ((known, False), (known | {"extra"}, True)):
        terms = Terms(Gate(), parts, numbers)
        assert (summed(given(came), nobody, jobs_of(range(3)), terms)[1] is not None) == some


def test_parts_that_nobody_sends_are_not_summed() -> None:
    """Replies stay as they are, and so do their order and their objects."""
    terms = Terms(Gate(), frozenset(), {"control": (0.5, 0.25, 0.25)})
    came = [reply(i, 1.0) for i in (2, 0, 1)]
    left, share = summed(given(came), nobody, jobs_of(range(3)), terms)
    assert all(a is b for a, b in zip(left, came, strict=True))
    assert share is None


def test_other_backends_are_as_they_were() -> None:
    books = Books(Fold(torch.arange(2), {}), Gate(), asked_of(range(2)))
    assert summing(loop, books) is loop
