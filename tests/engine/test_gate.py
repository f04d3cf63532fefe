"""Bad replies and absent clients: the round equals, bit for bit, the one without them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.backends import Reply
from fedshift.engine.checks.gate import Gate
from fedshift.engine.processes.pool import workers
from fedshift.engine.round import admit
from fedshift.engine.run import Federation, Round, play_round, run, start
from fedshift.engine.storage.checkpoint import read_checkpoint, write_checkpoint
from fedshift.errors import InputError, TrainingError
from fedshift.experiments.config.schema import Training
from fedshift.model import Model, build
from fedshift.recipes import Setting
from fedshift.testing.attacks import ATTACKS, spoil
from fedshift.testing.faults import Faulty, at, seeded
from fedshift.tree import flatten
from support.federations import TARGET, make_federation
from support.fuzz import Arena, arena, different, fuzz

DROP = Gate(on_bad="drop", max_norm=1e6, max_bytes=1 << 24)
SOME = ("nan", "drop", "one row", "two answers", "delay")


@pytest.fixture(scope="module")
def place() -> Arena:
    """A round of FedAvg over a network with BatchNorm, whose updates have all parts."""
    from support.federations import Normed

    model = build(Normed, seed=2)
    setting = Setting(model, TARGET, Local(lr=0.1, epochs=1, batch=100))
    return arena(recipes.fedavg(setting), make_federation(model), DROP)


@pytest.fixture
def setting(mlp: Model) -> Setting:
    """One local step."""
    return Setting(mlp, TARGET, Local(lr=0.1, epochs=None, steps=1, batch=8))


def gated(federation: Federation, **limits: Any) -> Federation:
    return replace(federation, gate=replace(DROP, **limits))


def differing_tensors(a: Round, b: Round) -> list[str]:
    parts = [{**r.server, **{f"{i} {p}": t for i, s in r.states.items() for p, t in s.items()}}
            for r in (a, b)]  # fmt: skip
    return different(*parts)


def test_the_corpus_is_large_enough() -> None:
    assert len(ATTACKS) >= 60


@pytest.mark.few(16)
@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_leaves_the_round_of_the_others(name: str, place: Arena) -> None:
    rest = [reply for reply in place.honest if reply.client != 3]
    spoilt = place.settled([*rest[:3], *spoil(name, place.honest[3]), *rest[3:]])
    assert [one.client for one in spoilt.dropped] == [3], spoilt.dropped
    assert not spoilt.skipped
    alone = place.settled(rest)
    assert different(spoilt.server, alone.server) == []
    assert torch.equal(spoilt.weights, alone.weights)
    assert different(spoilt.server, place.settled(place.honest).server)  # the control


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "name"), [("fedpals", "duplicate"), ("scaffold", "one row"), ("ditto", "drop")]
)
def test_a_run_of_three_rounds(method: str, name: str, setting: Setting, mlp: Model) -> None:
    """Client 3 misbehaves in round 2; its state stays as it was, and it takes part in round 3."""
    algorithm = getattr(recipes, method)(setting, **({"ess": 0.9} if method == "fedpals" else {}))
    federation = gated(make_federation(mlp))
    faulty = Faulty(at({(2, 3): name}))
    played = list(run(algorithm, federation, 3, backend=faulty))
    assert faulty.done == [(2, 3, name)]
    assert [[one.client for one in r.dropped] for r in played] == [[], [3], []]
    first = play_round(
        algorithm, federation, start(algorithm, federation).server, {}, torch.arange(6), 1
    )
    others = torch.tensor([0, 1, 2, 4, 5])
    second = play_round(algorithm, federation, first.server, first.states, others, 2)
    third = play_round(algorithm, federation, second.server, second.states, torch.arange(6), 3)
    assert differing_tensors(played[1], second) == []
    assert differing_tensors(played[2], third) == []
    assert differing_tensors(played[2], list(run(algorithm, federation, 3))[-1])  # the control


def test_a_gate_that_stops_names_the_client(setting: Setting, mlp: Model) -> None:
    faulty = Faulty(at({(2, 3): "nan"}))
    rounds = run(recipes.fedavg(setting), make_federation(mlp), 3, backend=faulty)
    with pytest.raises(TrainingError, match='client 3 sent non-finite numbers in "delta/'):
        list(rounds)
    stops = replace(make_federation(mlp), gate=Gate(max_norm=1e-9))
    with pytest.raises(TrainingError, match="client 0 sent a change of norm .*above max_norm = 1e"):
        list(run(recipes.fedavg(setting), stops, 1))


@pytest.mark.few(1)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_client_whose_training_fails_drops_out(
    side_by_side: bool, setting: Setting, mlp: Model
) -> None:
    federation = gated(make_federation(mlp))
    clients = list(federation.clients)
    clients[3] = clients[3]._replace(y=clients[3].y + 90)
    # As if it had gone bad after it registered; the check of round 0 would refuse it.
    broken = replace(federation)
    object.__setattr__(broken, "clients", tuple(clients))
    algorithm = recipes.fedavg(setting)
    server = start(algorithm, federation).server
    everyone, others = torch.arange(6), torch.tensor([0, 1, 2, 4, 5])
    if side_by_side:
        with workers(broken.clients, 2) as team:
            played = play_round(algorithm, broken, server, {}, everyone, 1, team)
    else:
        played = play_round(algorithm, broken, server, {}, everyone, 1)
    assert played.dropped[0].client == 3
    assert played.dropped[0].reason.startswith("client 3 failed: ")
    assert differing_tensors(played, play_round(algorithm, federation, server, {}, others, 1)) == []


def test_a_delayed_reply_is_not_used_a_round_later(setting: Setting, mlp: Model) -> None:
    """It arrives in round 2 with the round's reply, so neither is used; round 3 is whole again."""
    faulty = Faulty(at({(1, 3): "delay"}))
    played = list(run(recipes.fedavg(setting), gated(make_federation(mlp)), 3, backend=faulty))
    assert [one.dropped for one in played] == [
        ((3, "no answer in time", "timeout"),), ((3, "client 3 answered twice", "reply"),), ()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"min_clients": 6}, "round 2: 5 usable replies, fewer than min_clients = 6"),
        ({"max_gap": 1e-3, "target": TARGET}, "round 1: the gap to the target is "),
    ],
)
def test_rounds_below_a_limit_are_skipped(
    limits: dict[str, Any], why: str, setting: Setting, mlp: Model
) -> None:
    federation = gated(make_federation(mlp), **limits)
    faulty = Faulty(at({(2, 3): "nan"}))
    played = list(islice(run(recipes.scaffold(setting), federation, 9, backend=faulty), 3))
    skipped = next(one for one in played if one.skipped)
    assert skipped.skipped.startswith(why)
    assert (skipped.trained, skipped.skips) == ((), 1)
    before = start(recipes.scaffold(setting), federation) if skipped.t == 1 else played[0]
    assert differing_tensors(skipped, before) == []


def test_too_many_skipped_rounds_end_the_run(setting: Setting, mlp: Model, tmp_path: Any) -> None:
    federation = gated(make_federation(mlp), max_skips=3)
    algorithm = recipes.fedavg(setting)
    rounds = run(algorithm, federation, 9, backend=Faulty(seeded(1.0, ("nan",))))
    second = [next(rounds), next(rounds)][-1]
    message = "3 rounds in a row were skipped; the last one: round 3: none of 6"
    with pytest.raises(TrainingError, match=message):
        next(rounds)
    write_checkpoint(tmp_path, second, {})
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert (saved.round.dropped, saved.round.skipped) == (second.dropped, second.skipped)
    assert saved.round.skips == second.skips == 2
    again = run(algorithm, federation, 9, after=saved.round, backend=Faulty(seeded(1.0, ("nan",))))
    with pytest.raises(TrainingError, match="3 rounds in a row"):
        next(again)


def test_no_weights_over_those_left(setting: Setting, mlp: Model) -> None:
    """Six clients can share a cap of 0.2, four cannot: the round is skipped, and Krum's too."""
    federation = gated(make_federation(mlp))
    faulty = Faulty(at({(1, 1): "nan", (1, 2): "drop"}))
    capped = recipes.fedpals(setting, lam=5.0, cap=0.2)
    played = next(run(capped, federation, 2, backend=faulty))
    assert played.skipped.startswith("round 1: clients [0, 3, 4, 5] are left, and there are no")
    played = next(run(recipes.krum(setting, byzantine=1), federation, 2, backend=faulty))
    assert "4 clients' changes are too few for byzantine=1" in played.skipped
    with pytest.raises(InputError, match="too few"):  # with all clients present
        list(run(recipes.krum(setting, byzantine=3), federation, 1))


def test_down_to_one_client(setting: Setting, mlp: Model) -> None:
    federation = gated(make_federation(mlp))
    faults = at({(1, i): name for i, name in zip((0, 1, 2, 4, 5), SOME, strict=False)})
    (played,) = run(recipes.fedavg(setting), federation, 1, backend=Faulty(faults))
    server = start(recipes.fedavg(setting), federation).server
    alone = play_round(recipes.fedavg(setting), federation, server, {}, torch.tensor([3]), 1)
    assert differing_tensors(played, alone) == []
    assert played.weights.tolist() == [1.0]


def test_seeded_plans_are_functions_of_round_and_client() -> None:
    plan, again = seeded(0.3, seed=5), seeded(0.3, seed=5)
    plans = [plan(t, i) for t in range(40) for i in range(10)]
    assert plans == [again(t, i) for t in range(40) for i in range(10)]
    assert 80 < sum(one is not None for one in plans) < 160
    assert not any(seeded(0.0)(t, 1) for t in range(40))
    with pytest.raises(InputError, match=r'unknown attack "nam"; .* Did you mean "nan"\?'):
        seeded(0.5, ("nam",))
    with pytest.raises(InputError, match="rate=2"):
        seeded(2.0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"on_bad": "dorp"}, 'Did you mean "drop"'),
        ({"max_norm": 0.0}, "max_norm=0.0, max_gap=inf; allowed: max_norm > 0"),
        ({"max_norm": float("nan")}, "allowed: max_norm > 0"),
        ({"max_gap": 0.1}, "max_gap needs the target's label shares"),
        ({"min_clients": 0}, "min_clients must be at least 1, got 0"),
    ],
)
def test_limits_out_of_range_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Gate(**limits)


def test_a_run_of_skipped_rounds_alone_fails(setting: Setting, mlp: Model) -> None:
    rounds = run(recipes.fedavg(setting), gated(make_federation(mlp)), 2,
                 backend=Faulty(seeded(1.0, ("inf",))))  # fmt: skip
    with pytest.raises(TrainingError, match="2 rounds in a row were skipped"):
        list(rounds)


def test_limits_in_a_configuration() -> None:
    with pytest.raises(ValueError, match='set on_bad_reply = "drop"'):
        Training(min_clients=2)
    with pytest.raises(ValueError, match='clients drop out; set on_bad_reply = "drop"'):
        Training(deadline=2.0)


@pytest.mark.slow
def test_fuzzed_replies(place: Arena) -> None:
    fuzzed = fuzz(place, 2000, seed=0)
    assert fuzzed.broken == ()
    assert 0 < fuzzed.used < fuzzed.replies / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_fuzzed_replies(seed: int, place: Arena) -> None:
    fuzzed = fuzz(place, 4_000, seed=100 + seed)
    assert fuzzed.broken == ()


def test_the_fuzzer_finds_an_open_gate(place: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the check of numbers, NaN gets in within a few replies."""
    monkeypatch.setattr("fedshift.engine.checks.replies.finite", lambda v: True)
    monkeypatch.setattr("fedshift.engine.round.finite", lambda v: True)
    assert any("is not finite" in one for one in fuzz(replace(place, gate=Gate(on_bad="drop")),
                                                      300, seed=0).broken)  # fmt: skip


leaves = st.builds(
    lambda shape, kind, number: torch.full(shape, number, dtype=torch.float64).to(kind),
    st.lists(st.integers(0, 13), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]),
    st.floats(width=32) | st.just(0.5),
)
NAMES = st.sampled_from(["body.0.weight", "head.bias", "id", "loss", ""]) | st.text(max_size=3)
PARTS = st.sampled_from(["delta", "buffers", "counters", "report", "weight"]) | st.text(max_size=3)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(PARTS, st.dictionaries(NAMES, leaves, max_size=4), max_size=5), st.data())
def test_whatever_hypothesis_makes_up(place: Arena, parts: Any, data: Any) -> None:
    """Alone, within an honest update, and twice: the round equals the one of the other clients."""
    honest = place.honest[2]
    mixed = {**honest.update, **parts}
    rest = [r for r in place.honest if r.client != 2]
    for update in (parts, mixed):
        if flatten(update).keys() == flatten(honest.update).keys():
            continue
        reply = Reply(2, update, {}, data.draw(st.sampled_from([1, 1, 1, 0, 2])))
        _, bad = admit([reply, *rest], place.opened, place.gate, {})
        assert [one.client for one in bad] == [2]
    alone = place.settled([Reply(2, parts, {}, 1)])
    assert alone.skipped
    assert different(alone.server, place.server) == []
