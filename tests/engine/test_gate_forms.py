"""Odd forms in a method's specific parts, and what no sum of replies may do to the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.client.local import Local
from fedshift.engine.backends import Job, Reply, Stage, loop
from fedshift.engine.checks.gate import Gate
from fedshift.engine.checks.replies import finite
from fedshift.engine.run import Federation, Round, play_round, run, start
from fedshift.errors import TrainingError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.tree import Parts, flatten
from support.every_method import MAKE
from support.federations import make_clients, make_federation
from support.fuzz import arena, different, fuzz

pytestmark = pytest.mark.routed

Change = Callable[[Parts], Any]


@pytest.fixture
def setting(mlp: Model) -> Setting:
    return Setting(mlp, (0.2,) * 5, Local(lr=0.1, epochs=None, steps=1, batch=8))


def federation(model: Model, *sizes: int) -> Federation:
    clients = make_clients(0, sizes) if sizes else None
    return replace(make_federation(model, clients), gate=Gate(on_bad="drop"))


def first(algorithm: Any, many: Federation, change: Change) -> Round:
    """Round 1, with a changed answer of client 0."""

    def backend(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in loop(stage, jobs):
            yield reply._replace(update=change(reply.update)) if reply.client == 0 else reply

    return next(run(algorithm, many, 2, backend=backend))


def each(part: str, change: Callable[[Tensor], Any]) -> Change:
    return lambda update: {**update, part: {k: change(v) for k, v in update[part].items()}}


@pytest.mark.parametrize(
    "change",
    [lambda v: v[None], lambda v: v[:1], lambda v: v.flatten()[:1], lambda v: v.double()],
    ids=["leading axis", "one row", "one number", "float64"],
)
def test_one_of_two_clients_does_not_decide_the_form(change: Any, setting: Setting) -> None:
    """The form of SCAFFOLD's controls is that of the control sent, not a majority's."""
    algorithm, two = MAKE["scaffold"](setting), federation(setting.model, 9, 23)
    played = first(algorithm, two, each("control", change))
    assert [one.client for one in played.dropped] == [0]
    server = start(algorithm, two).server
    alone = play_round(algorithm, two, server, {}, torch.tensor([1]), 1)
    assert different(played.server, alone.server) == []
    assert not played.skipped


@pytest.mark.parametrize("shape", [(7,), (1, 7), (1,)])
def test_a_single_reply_changes_no_form(shape: tuple[int, ...], setting: Setting) -> None:
    """A part without a counterpart in the message: a step that would broadcast is refused."""
    algorithm, one = MAKE["fednova"](setting), federation(setting.model, 9)
    played = first(algorithm, one, each("normaliser", lambda v: v.expand(shape)))
    before, after = flatten(start(algorithm, one).server), flatten(played.server)
    assert {k: (v.shape, v.dtype) for k, v in after.items()} == {
        k: (v.shape, v.dtype) for k, v in before.items()
    }
    if played.skipped:
        assert different(played.server, start(algorithm, one).server) == []


def test_a_step_that_changes_the_servers_form_is_skipped(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, many = MAKE["fedavg"](setting), federation(setting.model)
    monkeypatch.setattr("fedshift.algorithms.fedavg.fold", lambda server, *rest: {
        "params": {k: v[None] for k, v in server["params"].items()}})  # fmt: skip
    played = next(run(algorithm, many, 2))
    assert played.skipped.startswith("round 1: the server's step gave \"params/")
    assert played.skipped.endswith("another form")


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_an_optimiser_that_would_never_move_again(name: str, setting: Setting) -> None:
    """A finite change with an infinite square: the model stays finite, second moments do not."""
    algorithm, many = MAKE[name](setting), federation(setting.model)
    played = first(algorithm, many, each("delta", lambda v: torch.full_like(v, 1e30)))
    assert "the server's step left non-finite numbers in \"optimizer/" in played.skipped
    usual = first(algorithm, many, each("delta", lambda v: v))
    assert not usual.skipped


ODD: dict[str, tuple[Change, str]] = {
    "a gradient's history": (each("delta", lambda v: v.clone().requires_grad_()), "detach"),
    "a parameter": (each("delta", torch.nn.Parameter), "with the history of its gradient"),
    "sparse": (each("delta", lambda v: v.to_sparse()), "which is not dense"),
    "without numbers": (each("delta", lambda v: v.to("meta")), "which is not dense"),
    "numpy": (each("delta", lambda v: v.numpy()), "which is no tensor but ndarray"),
    "a number": (each("report", lambda v: 1.0), "which is no tensor but float"),
    "no part": (lambda update: {**update, "delta": None}, "not parts of named tensors"),
    "nothing": (lambda update: None, "not parts of named tensors"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize(("change", "reason"), ODD.values(), ids=ODD)
def test_what_is_no_plain_tensor_is_dropped(change: Change, reason: str, setting: Setting) -> None:
    algorithm, many = MAKE["fedavg"](setting), federation(setting.model)
    played = first(algorithm, many, change)
    assert [one.client for one in played.dropped] == [0]
    assert reason in played.dropped[0].reason
    server = start(algorithm, many).server
    alone = play_round(algorithm, many, server, {}, torch.arange(1, 6), 1)
    assert different(played.server, alone.server) == []


KEPT: dict[str, tuple[Any, str]] = {
    "nothing": (None, "would keep what is not parts of named tensors"),
    "a list": ([1], "would keep what is not parts of named tensors"),
    "a number": ({"personal": {"w": 1.0}}, 'would keep "personal/w", which is no tensor but float'),
    "no part": ({"personal": None}, "would keep what is not parts of named tensors"),
    "history": ({"own": {"w": torch.zeros(1, requires_grad=True)}}, "history of its gradient"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("on_bad", ["drop", "stop"])
@pytest.mark.parametrize(("state", "reason"), KEPT.values(), ids=KEPT)
def test_a_state_that_is_no_parts_of_tensors_is_reported(
    state: Any, reason: str, on_bad: Any, setting: Setting
) -> None:
    algorithm = MAKE["fedavg"](setting)
    many = replace(federation(setting.model), gate=Gate(on_bad=on_bad))

    def backend(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in loop(stage, jobs):
            yield reply._replace(changed=state) if reply.client == 2 else reply

    played = run(algorithm, many, 1, backend=backend)
    if on_bad == "stop":
        with pytest.raises(TrainingError, match="^client 2 would keep"):
            next(played)
        return
    (dropped,) = next(played).dropped
    assert (dropped.client, reason in dropped.reason) == (2, True)


def test_replies_with_too_many_bytes_are_not_read(setting: Setting) -> None:
    """The reply's form is right otherwise; the other replies are within the limit."""
    algorithm, many = MAKE["fedavg"](setting), federation(setting.model)
    large = lambda update: {**update, "delta": update["delta"] | {"x": torch.zeros(1 << 14)}}  # noqa: E731
    limited = replace(many, gate=Gate(on_bad="drop", max_bytes=1 << 16))
    played = first(algorithm, limited, large)
    assert "bytes; allowed: 65536" in played.dropped[0].reason
    assert 'a different "delta"' in first(algorithm, many, large).dropped[0].reason  # the control


def test_the_message_outvotes_a_majority(setting: Setting) -> None:
    """Four of six replies have one axis more: the form is the model's, not the majority's."""
    algorithm, many = MAKE["fedavg"](setting), federation(setting.model)
    odd = each("delta", lambda v: v[None])

    def backend(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in loop(stage, jobs):
            yield reply._replace(update=odd(reply.update)) if reply.client < 4 else reply

    played = next(run(algorithm, many, 2, backend=backend))
    assert [one.client for one in played.dropped] == [0, 1, 2, 3]
    server = start(algorithm, many).server
    alone = play_round(algorithm, many, server, {}, torch.tensor([4, 5]), 1)
    assert different(played.server, alone.server) == []


def test_what_a_client_would_keep_is_finite_too(setting: Setting) -> None:
    """Its personal model diverged, which the update does not show; it keeps the earlier one."""
    algorithm, many = MAKE["ditto"](setting), federation(setting.model)

    def backend(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in loop(stage, jobs):
            spoilt = {k: {n: v * torch.nan for n, v in t.items()} for k, t in reply.changed.items()}
            yield reply._replace(changed=spoilt) if reply.client == 0 else reply

    played = next(run(algorithm, many, 2, backend=backend))
    assert [one.client for one in played.dropped] == [0]
    assert played.dropped[0].reason.startswith("client 0 would keep non-finite numbers in")
    assert 0 not in played.states


def test_large_numbers_are_finite() -> None:
    """Their sum is infinite; and infinities that would cancel are refused."""
    assert finite(torch.full((4,), 3e38))
    assert not finite(torch.tensor([torch.inf, 1.0, -torch.inf]))
    assert not finite(torch.tensor([1.0, torch.nan]))


def test_the_gap_is_that_of_the_clients_left(setting: Setting) -> None:
    many, target = federation(setting.model), (0.0, 0.0, 0.0, 0.0, 1.0)
    many = replace(many, gate=Gate(on_bad="drop", max_gap=1e-3, target=target))
    algorithm = MAKE["fedavg"](setting)
    played = first(algorithm, many, each("delta", lambda v: v * torch.nan))
    counts = many.table["labels"]
    gaps = [
        f"{float((torch.tensor(target) - rows.sum(0) / rows.sum()).norm()):.4g}"
        for rows in (counts[1:], counts[:-1], counts)
    ]
    assert f"the gap to the target is {gaps[0]}, above" in played.skipped
    assert len(set(gaps)) == 3  # the control


def test_an_unknown_gap_passes_no_limit() -> None:
    limited = Gate(on_bad="drop", max_gap=0.5, target=(0.5, 0.5))
    assert "the gap to the target is nan" in limited.lacking(3, float("nan"))
    assert limited.lacking(3, 0.5) == ""
    assert "0.51, above" in limited.lacking(3, 0.51)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "part"), [("fednova", "normaliser"), ("fedas", "fisher")])
def test_a_claim_below_0_weighs_nothing(name: str, part: str, setting: Setting) -> None:
    """A false number may be claimed, but it reverses no client's change."""
    algorithm, many = MAKE[name](setting), federation(setting.model)
    below, none, true = (
        first(algorithm, many, each(part, lambda v, by=by: v * by)).server
        for by in (-3.0, 0.0, 1.0)
    )
    assert different(below, none) == []
    assert different(below, true)


def test_strides_are_not_part_of_a_form(setting: Setting) -> None:
    """The control: the same numbers in another order of memory, or one number for all."""
    algorithm, many = MAKE["fedavg"](setting), federation(setting.model)
    plain = first(algorithm, many, lambda update: update)
    turned = each("delta", lambda v: v.t().contiguous().t() if v.dim() == 2 else v)
    assert different(first(algorithm, many, turned).server, plain.server) == []
    still = first(algorithm, many, each("delta", lambda v: torch.zeros(()).expand(v.shape)))
    assert still.dropped == ()


def fuzzed(name: str, setting: Setting, replies: int) -> tuple[str, ...]:
    gate = Gate(on_bad="drop", max_norm=1e6, max_bytes=1 << 24)
    algorithm = MAKE[name](setting)
    return fuzz(arena(algorithm, federation(setting.model), gate), replies, seed=1).broken


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["scaffold", "fednova", "fedadam"])
def test_fuzzed_replies_of_other_methods(name: str, setting: Setting) -> None:
    assert fuzzed(name, setting, 60) == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
def test_fuzzed_replies_of_every_method(name: str, setting: Setting) -> None:
    assert fuzzed(name, setting, 100) == ()
