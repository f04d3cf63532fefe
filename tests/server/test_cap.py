"""Weights under a cap: the projection by another solver, its laws, FedPALS under the same cap."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

from fedshift.errors import InputError
from fedshift.server.cap import capped, capped_columns
from fedshift.server.heads import pooled_prototypes
from fedshift.server.pals import pals_weights
from fedshift.server.rows import holder_shares
from fedshift.server.weights import BySize, Pals


@pytest.fixture
def source() -> np.random.Generator:
    return np.random.default_rng(0)


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def drawn(source: np.random.Generator, clients: int, spread: float) -> Tensor:
    """Weights over some orders of magnitude."""
    return torch.from_numpy(np.exp(spread * source.normal(size=clients))).softmax(0)


def by_root(a: np.ndarray, cap: float) -> np.ndarray:
    """min(cap, s a) with s by a search for the root of the sum: no sorting, no closed form."""
    s = brentq(lambda log_s: np.minimum(cap, np.exp(log_s) * a).sum() - 1.0, 0.0, 600.0, xtol=1e-15)
    return np.minimum(cap, np.exp(s) * a)


def test_another_solver_has_the_same_weights(source: np.random.Generator) -> None:
    tried = 0
    for trial in range(300):
        clients = int(source.integers(2, 40))
        sizes = np.ceil(np.exp(source.uniform(0, 1 + trial % 20, clients)))
        cap = float(source.uniform(1.0 / clients, 1.0))
        a = BySize()({"n": torch.from_numpy(sizes)})
        b = capped(a, cap)
        assert abs(float(b.sum()) - 1.0) < 1e-14
        assert float(b.max()) <= cap * (1 + 1e-12)
        if b is a:
            continue
        tried += 1
        np.testing.assert_allclose(b.numpy(), by_root(a.numpy(), cap), rtol=1e-9)
        # By sizes it is the programme of FedPALS at lambda = inf, of whatever labels.
        largest = pals_weights(sizes[:, None] * [0.5, 0.5], [0.5, 0.5], lam=np.inf, cap=cap)
        np.testing.assert_allclose(b.numpy(), largest.weights, rtol=1e-9)
    assert tried > 50


def test_no_other_weights_under_the_cap_are_nearer(source: np.random.Generator) -> None:
    """KL(b || a) grows towards any other weights under the cap."""
    a, cap = drawn(source, 8, 1.5), 0.2
    b = capped(a, cap)
    assert float(a.max()) > cap

    def divergence(c: Tensor) -> float:
        return float((c * (c / a).log()).sum())

    for _ in range(200):
        some = source.uniform(size=8) ** 3
        other = torch.from_numpy(by_root(some / some.sum(), cap))
        for step in (1e-3, 0.5):
            assert divergence(b + step * (other - b)) >= divergence(b)


def test_laws(source: np.random.Generator) -> None:
    a = drawn(source, 6, 2.0)
    assert capped(a, 1.0) is a  # no bit changes
    assert capped(a, float(a.max())) is a
    assert capped(a, 1 / 6).tolist() == pytest.approx([1 / 6] * 6, abs=1e-15)
    once = capped(a, 0.3)
    assert capped(once, 0.3).tolist() == once.tolist()
    order = torch.from_numpy(source.permutation(6))
    assert capped(a[order], 0.3).tolist() == pytest.approx(once[order].tolist(), abs=1e-15)
    below = once < 0.3
    ratios = (once / a)[below]
    assert float(ratios.max() / ratios.min()) == pytest.approx(1.0)


def test_a_claim_of_any_size() -> None:
    for claim in (1e9, 1e18, 1e300):
        a = BySize()({"n": vector(100, 300, claim)})
        assert float(a[2]) > 0.999999
        assert capped(a, 0.5).tolist() == pytest.approx([0.125, 0.375, 0.5])


def test_clients_that_the_rule_gave_nothing() -> None:
    """Clients with weight get the cap; the rest is shared evenly by others that have examples."""
    everyone, some = torch.tensor([True] * 4), torch.tensor([True, True, False, True])
    assert capped(vector(1, 0, 0, 0), 0.4).tolist() == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert capped(vector(1, 0, 0, 0), 0.4, some).tolist() == pytest.approx([0.4, 0.3, 0, 0.3])
    assert capped(vector(0.7, 0.3, 0, 0), 0.25, everyone).tolist() == [0.25] * 4
    # A cohort too small for the cap: 1/C of those that can have weight.
    assert capped(vector(0.9, 0.1), 0.1).tolist() == [0.5, 0.5]
    assert capped(vector(1, 0, 0, 0), 0.1, torch.tensor([True] + [False] * 3)).tolist()[0] == 1.0
    assert capped(torch.zeros(3).double(), 0.1).tolist() == [0.0] * 3  # a round without examples


def test_fedpals_finds_the_best_weights_under_the_cap() -> None:
    counts = vector(90, 5, 5, 60, 30, 10, 10, 80, 10, 5, 5, 90, 30, 40, 30).view(5, 3)
    table, target = {"n": counts.sum(1), "labels": counts}, (0.7, 0.2, 0.1)
    free = Pals(target, lam=0.1)(table)
    cap = 0.7 * float(free.max())
    best = Pals(target, lam=0.1, cap=cap, strict=False)(table)
    assert best.tolist() == Pals(target, lam=0.1, cap=cap)(table).tolist()
    assert capped(best, cap) is best  # the door has nothing to do

    def gap(a: Tensor) -> float:
        return float((torch.tensor(target).double() - a @ (counts / counts.sum(1)[:, None])).norm())

    assert gap(best) < gap(capped(free, cap))


def test_the_cap_goes_before_an_ess_out_of_reach() -> None:
    counts = vector(1e9, 0, 50, 50, 30, 70).view(3, 2)
    table = {"n": counts.sum(1), "labels": counts}
    with pytest.raises(InputError, match="ess=0.5 cannot be met: under this cap"):
        Pals((0.9, 0.1), ess=0.5, cap=0.5)(table)
    rule = Pals((0.9, 0.1), ess=0.5, cap=0.5, strict=False)
    assert rule(table).tolist() == pytest.approx([0.5, 0.25, 0.25])
    two = {name: column[:2] for name, column in table.items()}
    small = Pals((0.9, 0.1), lam=0.0, cap=0.1, strict=False)
    assert small(two).tolist() == pytest.approx([0.5, 0.5])
    with pytest.raises(InputError, match="use cap >= 0.5"):
        Pals((0.9, 0.1), lam=0.0, cap=0.1)(two)


def test_rows_and_prototypes_by_label() -> None:
    """Of h clients that hold a label none has a share of its row above the cap, or 1/h."""
    sets = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    weights = vector(0.1, 0.4, 0.5)
    free, bounded = holder_shares(weights, sets), holder_shares(weights, sets, 0.6)
    assert free[:, 1].tolist() == pytest.approx([1 / 6, 0, 5 / 6])
    assert bounded[:, 1].tolist() == pytest.approx([0.4, 0, 0.6])
    assert bounded[:, 2].tolist() == [0, 0, 1]  # it alone has this label
    assert bounded[:, 0].tolist() == weights.tolist()
    assert capped_columns(free, 1.0, sets) is free
    claims = {"mean": vector(1, 1, 2).view(3, 1, 1), "count": vector(50, 50, 1e9).view(3, 1)}
    assert float(pooled_prototypes(claims)["mean"]) > 1.99
    assert float(pooled_prototypes(claims, 0.4)["mean"]) == pytest.approx(1.4)
