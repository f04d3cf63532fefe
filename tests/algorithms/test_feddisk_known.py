"""FedDisk with true log ratios, and its warnings of weights that do nothing or cost much."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.algorithms.weighing import notes
from fedshift.client.importance import bounded, two_values
from fedshift.data import client_data
from fedshift.engine.run import Federation
from fedshift.errors import InputError, NeedlessWarning
from fedshift.experiments.config.load import validate
from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.folder.run_folder import kept_in
from fedshift.experiments.task.preparing import prepare
from fedshift.recipes import Setting
from support.by_hand import final, max_difference
from support.densities import direct, weighed
from support.federations import SIZES, make_clients


def ratios(scale: float = 1.0) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(4)
    return tuple(scale * torch.randn(n, generator=source, dtype=torch.float64) for n in SIZES)


def true(inputs: Setting, log_ratios: tuple[Tensor, ...] | None, **options: Any) -> Any:
    setting = replace(inputs, log_ratios=log_ratios)
    return direct(setting, estimator="true", least_ess=0.0, **options)


def test_true_weights_are_the_known_ratios(inputs: Setting, federated: Any) -> None:
    played = weighed(true(inputs, ratios()), federated())
    for i, true_ratios in enumerate(ratios()):
        least = torch.tensor(SIZES[i] / sum(SIZES), dtype=torch.float64)
        expected = bounded(true_ratios, torch.ones(len(true_ratios), dtype=torch.bool), least, 10.0)
        assert torch.equal(played.states[i]["importance"]["a"], expected)
    assert played.states[0]["importance"]["a"].std() > 0.1


def test_equal_is_the_inner_method_after_as_many_rounds(inputs: Setting, federated: Any) -> None:
    """The control has the cohorts and batches of the others, and weights of exactly 1."""
    even, zero = direct(inputs, estimator="equal"), true(inputs, ratios(0.0))
    a, b, c = (final(m, federated(), 5) for m in (even, zero, true(inputs, ratios())))
    assert max_difference(a.server["params"], b.server["params"]) == 0
    assert max_difference(a.server["params"], c.server["params"]) > 1e-6
    assert all(s["importance"]["a"].eq(1).all() for s in a.states.values())


def test_unknown_ratios_are_refused_before_round_1(inputs: Setting, federated: Any) -> None:
    words = 'estimator "true" needs log p.* densities of these data are not known.*"direct"'
    with pytest.raises(InputError, match=words):
        final(true(inputs, None), federated(), 1)
    short = (*ratios()[:3], ratios()[3][1:], *ratios()[4:])
    with pytest.raises(InputError, match=rf"client 3 has {SIZES[3]} examples and {SIZES[3] - 1} "):
        final(true(inputs, short), federated(), 1)
    with pytest.raises(InputError, match="client 5 has .* and 0 log ratios"):
        final(true(inputs, ratios()[:5]), federated(), 1)
    for wrong, message in (
        (ratios()[0][:, None], r"client 0 has 9 examples and log ratios of shape \[9, 1\]"),
        (torch.tensor(0.0), r"client 0 has .* and log ratios of shape \[\]; give log_ratios one"),
        (ratios()[0] / 0.0, "client 0: log_ratios has NaN or infinity; give finite log p"),
        (ratios()[0] * float("nan"), "client 0: log_ratios has NaN or infinity"),
    ):
        with pytest.raises(InputError, match=message):
            final(true(inputs, (wrong, *ratios()[1:])), federated(), 1)


LONG = {"training": {"rounds": 30, "steps": 1}}


def tables(name: str, **more: Any) -> dict[str, Any]:
    return {
        "data": {"name": name, "validation": 0.0},
        "shift": {"kind": "natural", "clients": 3},
        "model": {"name": "linear"},
        "method": {"name": "feddisk", "estimator": "true", "density_rounds": 1, "hidden": [4]},
        "training": {"rounds": 3, "steps": 1, "batch": 20},
    } | more  # fmt: skip


def test_a_generated_world_brings_its_ratios(inputs: Setting) -> None:
    config = validate(tables("binary-world", data={"name": "binary-world", "validation": 0.25}))
    ready = prepare(config)
    assert ready.log_ratios is not None
    for client, log_ratios in zip(ready.task.clients, ready.log_ratios, strict=True):
        assert len(client.y) == len(log_ratios)
        assert abs(len(log_ratios) - 3000) < 3
        # Those of the rows that are left for training: the ratio is a function of the bits.
        s = client.x.double().sum(1)
        for value in s.unique():
            assert log_ratios[s == value].std() < 1e-9
    done = run_experiment(config)
    weights = done.outcome.last.states[0]["importance"]["a"]
    assert weights.log().std() > 0.3
    assert np.corrcoef(weights.log(), ready.log_ratios[0])[0, 1] > 0.95


@pytest.mark.parametrize(
    "more",
    [
        {"data": {"name": "gaussians"}, "shift": {"kind": "natural", "clients": 2}},
        {"shift": {"kind": "natural", "clients": 3, "noise": 0.5}, "data": {"name": "looks-world"}},
    ],
)
def test_other_data_have_none(more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="the densities of these data are not known"):
        run_experiment(validate(tables("binary-world", **more)))


# ------------------------------------------------------------------ weights that do not pay


def test_weights_of_little_use_are_replaced_by_one(inputs: Setting, federated: Any) -> None:
    wide = ratios(3.0)
    weighing = weighed(true(inputs, wide), federated()).server["importance"]
    shares = weighing["ess"] / weighing["n"]
    assert torch.equal(weighing["estimated"], weighing["ess"])
    bound = float(shares.sort().values[2:4].mean())
    played = weighed(true(inputs, wide, useful=bound), federated())
    importance = played.server["importance"]
    assert torch.equal(importance["estimated"], weighing["estimated"])
    for i in range(len(SIZES)):
        even = bool(played.states[i]["importance"]["a"].eq(1).all())
        assert even == bool(shares[i] < bound)
        assert float(importance["ess"][i]) == float(
            (importance["n"] if even else weighing["ess"])[i]
        )


def importance(*shares: float, used: float | None = None) -> dict[str, Tensor]:
    n = torch.full((len(shares),), 100.0, dtype=torch.float64)
    estimated = 100 * torch.tensor(shares, dtype=torch.float64)
    ess = estimated if used is None else torch.full_like(n, 100 * used)
    return {"n": n, "ess": ess, "estimated": estimated}


def test_a_sentence_says_when_weights_do_nothing_or_too_much() -> None:
    assert notes(importance(0.8, 0.4, 0.0), range(3)) == []  # the control; client 2 has none yet
    (idle,) = notes(importance(0.999, 0.5, 0.995), range(3))
    assert idle.startswith("importance weights of client 2 (and of 1 more) are worth 99.5 %")
    assert "change nothing; take the method without densities" in idle
    (costly,) = notes(importance(0.2, 0.5), range(2))
    assert costly.startswith("importance weights of client 0 are worth 20 % of its examples")
    assert "take feddisk with useful = 0.3" in costly
    (replaced,) = notes(importance(0.2, used=1.0), [0])
    assert "so they are 1 instead; take the method without densities, or lower temper" in replaced
    (replaced,) = notes(importance(0.5, used=1.0), [0])  # useful = 0.6, for example
    assert "are worth 50 % of its examples, so they are 1 instead" in replaced
    assert notes(importance(1.0, used=1.0), [0]) == [
        idle.replace("2 (and of 1 more)", "0").replace("99.5", "100")
    ]


def test_users_are_warned_of_both(inputs: Setting, federated: Any) -> None:
    federation: Federation = federated(make_clients(sizes=(40, 40)))
    log_ratios = tuple(r[:40] if len(r) >= 40 else r.repeat(9)[:40] for r in ratios(1.0)[:2])
    for scale, words in ((0.01, "change nothing"), (9.0, "costs more than it mends")):
        with pytest.warns(NeedlessWarning, match=words):
            weighed(true(inputs, tuple(scale * r for r in log_ratios)), federation)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeedlessWarning)
        weighed(true(inputs, log_ratios), federation)


def test_two_values_are_seen_in_all_clients_together() -> None:
    bits = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    y = torch.tensor([0, 1])
    assert two_values([client_data(bits, y, 0), client_data(bits, y, 1)]) == (0.0, 1.0)
    assert two_values([client_data(bits, y, 0), client_data(bits / 2, y, 1)]) is None
    assert two_values([client_data(torch.zeros(2, 2), y, 0)]) is None
    assert two_values([client_data((255 * bits).byte(), y, 0)]) is None


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [None, 1])
def test_estimated_log_weights_have_the_slope_of_the_true_ones(cohort: int | None) -> None:
    """0.8 to 1.2 on Gaussians; Bernoulli likelihoods of the same numbers, a tenth."""
    from fedshift_papers.pictures.log_weights import estimates

    assert 0.8 < estimates("mixture", 0, cohort=cohort)["direct"].slope < 1.2
    assert abs(estimates("bernoulli", 0, cohort=cohort)["direct"].slope) < 0.3


@pytest.mark.parametrize(("method", "same"), [("feddisk", False), ("made", False), ("moon", True)])
def test_checkpoints_of_before_are_not_gone_on_from(
    method: str, same: bool, tmp_path: Path
) -> None:
    """They have other defaults and another form of state, and belong to another run."""
    network = {"name": "mlp", "hidden": [4]}
    config = validate(tables("binary-world", model=network, method={"name": method}) | LONG)
    ready = prepare(config)
    texts = config.identity, ready.data.sha256, ready.split_sha256
    before = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    assert (kept_in(tmp_path, config, ready).identity == before) == same
