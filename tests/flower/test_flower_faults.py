"""Every attack on Flower's messages: the strategy's round equals the one without the attacker."""

from __future__ import annotations

import pytest
import torch

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.checks.gate import Gate
from fedshift.engine.run import play_round, start
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.testing.attacks import ATTACKS
from fedshift.testing.faults import at
from support.federations import make_federation

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.flower import LocalGrid, client_app, play
from support.flower_faults import BYTES, faulty_app
from support.flower_runs import differing_tensors, sites, strategy_of

GATE = Gate(on_bad="drop", max_norm=1e6, max_bytes=1 << 22)
# An app answers once, NumPy has no bfloat16, and 4 TB cannot be sent; the engine's tests have them.
ELSEWHERE = ("duplicate", "two answers", "bfloat16", "terabytes")
PLAIN = [k for k, v in ATTACKS.items() if v.part not in ("buffers", "counters")]
NAMES = [*BYTES, *(k for k in PLAIN if k not in ELSEWHERE)]


@pytest.fixture
def setting(mlp: Model) -> Setting:
    """One local step."""
    return Setting(mlp, (0.4, 0.3, 0.2, 0.1, 0.0), Local(lr=0.1, epochs=None, steps=1, batch=4))


@pytest.mark.slow
def test_every_attack_on_messages(setting: Setting, mlp: Model) -> None:
    """Client 3 attacks in every round, each time in another way."""
    algorithm, federation = recipes.fedavg(setting), make_federation(mlp)
    attacks = dict(enumerate(NAMES, 1))
    app = client_app(sites(algorithm, federation))
    grid = LocalGrid(faulty_app(app, lambda t, i: attacks[t] if i == 3 else None), 6)
    others, before = torch.tensor([0, 1, 2, 4, 5]), start(algorithm, federation)
    for played in play(strategy_of(algorithm, federation, gate=GATE), grid, len(NAMES)):
        name = attacks[played.t]
        assert [one.client for one in played.dropped] == [3], name
        if played.t <= len(BYTES) + 3 or played.t % 10 == 0:
            alone = play_round(algorithm, federation, before.server, {}, others, played.t)
            assert differing_tensors(alone._replace(states={}), played) == [], name
        before = played


def test_rounds_without_usable_answers_are_skipped(setting: Setting, mlp: Model) -> None:
    algorithm, federation = recipes.fedavg(setting), make_federation(mlp)
    app = faulty_app(client_app(sites(algorithm, federation)), lambda t, i: "nan")
    grid = LocalGrid(app, 6)
    gate = Gate(on_bad="drop", max_skips=3)
    rounds = play(strategy_of(algorithm, federation, gate=gate), grid, 9)
    played = next(rounds)
    assert played.skipped.startswith("round 1: none of 6 clients sent an update that can be used")
    assert differing_tensors(start(algorithm, federation), played) == []
    next(rounds)
    with pytest.raises(TrainingError, match="3 rounds in a row were skipped"):
        next(rounds)
    with pytest.raises(InputError, match='unknown attack "nam"'):
        at({(1, 1): "nam"})
