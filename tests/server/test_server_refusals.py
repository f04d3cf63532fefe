"""What the server's functions refuse at the door: what was called, and what the answer names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedshift.engine.checks.gate import Gate
from fedshift.errors import InputError
from fedshift.server.confree import ConFree
from fedshift.server.discrepancy import Disco
from fedshift.server.label_weights import JointLabels
from fedshift.server.optimizers import Adam, Sgd, Yogi
from fedshift.server.pals import effective_sample_size, ess_curve, pals_weights
from fedshift.server.prior import prior_shift
from fedshift.server.robust import Geometric, Krum, Trimmed
from fedshift.server.weights import Pals

COUNTS = np.array([[40, 0, 10], [0, 300, 20], [5, 5, 0], [1000, 900, 100], [0, 0, 7]])
TARGET = np.array([0.2, 0.5, 0.3])


def of(**change: Any) -> Callable[[], Any]:
    """A call of `pals_weights` at lam = 1 with this change."""
    return lambda: pals_weights(**({"label_counts": COUNTS, "target": TARGET, "lam": 1.0} | change))


CASES: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
    (of(label_counts=[1, 2, 3]), ("table [clients, classes]", "shape (3,)")),
    (of(label_counts=np.zeros((0, 3))), ("shape (0, 3)",)),
    (of(label_counts=[[1, 2], [3]]), ("rows of one length",)),
    (of(label_counts=[["a", "b", "c"]]), ("table of numbers",)),
    (of(label_counts=[[1, 2, 3], [0, -4, 1]]), ("label_counts[1, 1]", "negative", ">= 0")),
    (of(label_counts=[[1, 2, np.nan]]), ("label_counts[0, 2]", "not finite")),
    (of(label_counts=[[1, np.inf, 0]]), ("label_counts[0, 1]", "not finite")),
    (of(label_counts=np.zeros((4, 3))), ("all zero",)),
    (of(label_counts=[[1e-13, 0, 0], [1, 1, 1]]), ("label_counts[0]", "give 0 where")),
    (of(label_counts=[[0.3, 0.7, 0], [0.8, 0.1, 0.1]]), ("these are shares", "sizes[:, None]")),
    (of(target=[0.5, 0.5]), ("3 classes", "shape (2,)")),
    (of(target=[0.5, -0.1, 0.6]), ("target[1]", "negative", "0 to 1")),
    (of(target=[0.5, np.nan, 0.5]), ("target[1]", "not finite")),
    (of(target=[0.5, 0.5, 0.1]), ("target sums to 1.1", "normalise_target=True")),
    (of(target=["a", "b", "c"]), ("target", "list of 3 numbers")),
    (of(target=[0, 0, 0], normalise_target=True), ("sums to 0",)),
    (of(ess=0.5), ("exactly one of lam and ess", "both")),
    (of(lam=None), ("exactly one of lam and ess", "neither")),
    (of(lam=-1.0), ("lam", ">= 0", "-1.0")),
    (of(lam=math.nan), ("lam", "nan")),
    (of(lam=1e-120), ("lam", "give lam=0")),
    (of(lam=None, ess=0.0), ("ess", "0 < ess <= 1")),
    (of(lam=None, ess=25), ("ess", "25")),
    (of(cap=0.0), ("cap", "0 < cap <= 1")),
    (of(cap=math.nan), ("cap", "nan")),
    (of(cap=0.19), ("5 clients", "use cap >= 0.2")),
    (of(fidelity="squred"), ("squred", "Did you mean")),
    (of(lam=None, ess=0.99, cap=0.25), ("ess=0.99 cannot be met", "raise cap or lower ess")),
    (of(cost=[1, 2]), ("cost", "5 clients")),
    (of(cost=[1, 0, 1, 1, 1]), ("cost[1] is 0", "above")),
    (of(cost=[1, np.nan, 1, 1, 1]), ("cost[1]", "not finite")),
    (of(cost=[1, 1e13, 1, 1, 1]), ("cost[1]", "drowns all else")),
    (of(cost=["a"] * 5), ("cost", "list of 5 numbers")),
    (of(rows=np.ones((3, 3))), ("rows", "5 clients")),
    (of(rows=np.ones((5, 2))), ("rows have 2 columns", "shape (3,)")),
    (of(cost=[1] * 5, fidelity="norm"), ("norm", "takes no cost")),
    (of(rows=np.ones((5, 3)), normalise_target=True), ("normalise_target", "leave it out")),
    (lambda: effective_sample_size([0.5, 0.5], [1, 2, 3]), ("one length",)),
    (lambda: effective_sample_size([0.5, 0.5], [1, 0]), ("only clients with examples",)),
    (lambda: effective_sample_size([0.5, 0.6], [1, 1]), ("sum to 1", "a / a.sum()")),
    (lambda: ess_curve(COUNTS, TARGET, (0.5, 2)), ("ess", "2")),
    (lambda: ess_curve(COUNTS, TARGET, "0.5"), ("fractions", "list")),
    (lambda: Pals((0.5, 0.6), lam=1.0), ("target sums to 1.1", "label shares")),
    (lambda: JointLabels((1.5, -0.5)), ("target[1]", "negative")),
    (lambda: prior_shift([0.5, 0.6], [0.5, 0.5]), ("target sums to 1.1",)),
    (lambda: prior_shift([0.5, 0.5], [np.nan, 1.0]), ("trained_on[0]", "not finite")),
    (lambda: prior_shift(["a", "b"], [0.5, 0.5]), ("target", "list of numbers")),
    (lambda: prior_shift([[0.5, 0.5]], [0.5, 0.5]), ("target", "one entry per class")),
    (lambda: prior_shift([0.5, 0.5], [0.2, 0.3, 0.5]), ("2 labels", "3")),
    (lambda: Disco((0.5, 0.5), a=-1.0), ("Disco a", "0 or more", "-1")),
    (lambda: Disco((0.5, 0.5), b=math.inf), ("Disco b", "0 or more")),
    (lambda: Disco((0.5, 0.5), distance="l3"), ("distance of FedDisco",)),  # type: ignore[arg-type]
    (lambda: Disco((0.5, 0.6)), ("towards sums to 1.1",)),
    (lambda: Disco((1.0, 0.0)), ("infinite", 'distance = "l2"')),
    (lambda: ConFree(alpha=math.inf), ("ConFree alpha", "0 or more")),
    (lambda: ConFree(scope="layer"), ("scope of ConFree",)),  # type: ignore[arg-type]
    (lambda: Sgd(lr=0.0), ("Sgd lr", "positive")),
    (lambda: Sgd(momentum=1.0), ("Sgd momentum", "[0, 1)")),
    (lambda: Adam(lr=0.0), ("Adam lr", "positive", "0.0")),
    (lambda: Yogi(tau=math.nan), ("Yogi tau", "positive", "nan")),
    (lambda: Adam(beta1=1.0), ("Adam beta1", "[0, 1)")),
    (lambda: Yogi(beta2=-0.1), ("Yogi beta2", "[0, 1)")),
    (lambda: Trimmed(share=0.5), ("share", "less than 0.5")),
    (lambda: Krum(byzantine=-1), ("byzantine", "-1")),
    (lambda: Krum(keep=0), ("keep", "at least 1")),
    (lambda: Geometric(floor=0.0), ("floor", "positive")),
    (lambda: Geometric(steps=0), ("steps", "at least 1")),
    (lambda: Geometric(tolerance=-1.0), ("tolerance", "0 or more")),
    (lambda: Gate(max_weight=0.0), ("max_weight", "more than 0")),
    (lambda: Gate(max_weight=math.nan), ("max_weight", "at most 1")),
]


@pytest.mark.parametrize(("call", "named"), CASES, ids=range(len(CASES)))
def test_bad_input_is_refused_with_what_to_do(
    call: Callable[[], Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as refused:
        call()
    for part in named:
        assert part in str(refused.value)
