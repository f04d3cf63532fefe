"""What `fedshift.diagnose.diagnose` finds, as plain frozen values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

from fedshift.errors import visible
from fedshift.files import clean

# Differences below one percent of the label mass are not worth a sentence.
NOTICEABLE = 0.01


@dataclass(frozen=True)
class Label:
    """One label's mass in the target and in three mixtures of the clients, all in [0, 1].

    fedavg: sum_i (n_i / N) S_i; pals: sum_i a_i S_i with the chosen weights; closest: with the
    weights of lambda = 0 and no cap. holders: how many clients have examples of the label.
    """

    name: str
    target: float
    fedavg: float
    pals: float
    closest: float
    holders: int


@dataclass(frozen=True)
class CurvePoint:
    """One lambda: its ESS and how far its mixture is from the target.

    distance = ||T - S^T a||_2; l1 = ||T - S^T a||_1, half of which is the misplaced label mass;
    cost = l1 / 2 + sqrt(K / ESS), which the recommendation minimises.
    """

    name: str
    lam: float
    ess: float
    ess_fraction: float
    distance: float
    l1: float
    cost: float
    largest_weight: float
    chosen: bool = False


@dataclass(frozen=True)
class Carrier:
    """One client: its share of the examples, its weight, and the hull distance without it.

    `without` is None where it was not computed (only for the few largest weights) or no other
    client has data.
    """

    name: str
    n: float
    n_share: float
    weight: float
    without: float | None = None


@dataclass(frozen=True)
class Claim:
    """What a lie would gain: client `name` claims `examples` examples distributed as T.

    weight: its weight by its true counts; gains: its weight by the claim, without a cap. Counts
    are taken on trust, and the weight goes to 1 as the claim grows.
    """

    name: str
    weight: float
    examples: float
    gains: float


@dataclass(frozen=True)
class Interval:
    """A bootstrap interval for the hull distance; see `fedshift.diagnose.distance_interval`."""

    low: float
    high: float
    level: float
    draws: int


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Whether a mixture of M clients can match the target, and its price; `print` shows a verdict.

    covered         the hull distance is at most `tolerance`
    distance        min_a ||T - S^T a||_2 over all weightings (no cap)
    case            inside: an exact match with all clients exists; face: an exact match exists but
                    leaves clients out; outside: there is none
    closest_gap     L1 distance of the closest mixture (lambda = 0, no cap)
    capped_gap      L1 distance at lambda = 0 under the cap; None without a cap
    outsiders       clients with examples of a label that the target does not have: an exact match
                    must leave them out
    curve           from lambda = 0 to the largest ESS; one point is marked as chosen
    chosen_by       "rule", "lam" or "ess"; asked: that ESS, a share of the examples
    carriers        clients with data, the largest weight first
    weighed_ess     ESS of weighing examples by their labels (`fedpals_joint`), in examples; 0 if
                    no client has a label of the target
    claim           what the client of least weight would gain by a lie; None for a single client,
                    and with a cap, which bounds the gain
    """

    covered: bool
    distance: float
    tolerance: float
    case: Literal["inside", "face", "outside"]
    closest_gap: float
    capped_gap: float | None
    cap: float | None
    outsiders: int
    labels: tuple[Label, ...]
    curve: tuple[CurvePoint, ...]
    chosen_by: Literal["rule", "lam", "ess"]
    rule: str
    carriers: tuple[Carrier, ...]
    certified: bool
    weighed_ess: float = 0.0
    asked: float | None = None
    claim: Claim | None = None
    interval: Interval | None = None
    verdict: tuple[str, ...] = ()

    @property
    def clients(self) -> int:
        """M: how many clients have data."""
        return len(self.carriers)

    @property
    def examples(self) -> float:
        """N = sum_i n_i."""
        # fsum is exact: a plain sum would depend on the order of the clients.
        return math.fsum(c.n for c in self.carriers)

    @property
    def fedavg_gap(self) -> float:
        """L1 distance of the n-weighted mean, ||T - sum_i (n_i / N) S_i||_1."""
        return math.fsum(abs(x.target - x.fedavg) for x in self.labels)

    @property
    def largest_weight(self) -> float:
        """max_i a_i for the counts as claimed; a client that lies can get more (`claim`)."""
        return self.carriers[0].weight

    @property
    def noise_factor(self) -> float:
        """M max_i a_i: how much more noise the same differential privacy needs than with 1 / M."""
        return self.clients * self.largest_weight

    @property
    def missing(self) -> tuple[str, ...]:
        """Labels with mass in the target that no client has."""
        return tuple(x.name for x in self.labels if x.target > 0 and not x.holders)

    @property
    def deficit(self) -> tuple[str, ...]:
        """Labels that even the closest mixture has too little of, by more than `NOTICEABLE`."""
        return tuple(x.name for x in self.labels if x.target - x.closest > NOTICEABLE)

    @property
    def surplus(self) -> tuple[str, ...]:
        """Labels that even the closest mixture has too much of, by more than `NOTICEABLE`."""
        return tuple(x.name for x in self.labels if x.closest - x.target > NOTICEABLE)

    @property
    def chosen(self) -> CurvePoint:
        """The recommended setting, or the requested one."""
        return next(p for p in self.curve if p.chosen)

    def __str__(self) -> str:
        return visible("\n".join(self.verdict), keep="\n")

    def __repr__(self) -> str:
        return f"Diagnosis({self.case}: distance {self.distance:.3f}, chosen {self.chosen.name})"

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(visible(sentence))}</p>" for sentence in self.verdict)

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps(..., allow_nan=False)`: infinity is the text "inf"."""
        derived = {name: getattr(self, name) for name in _DERIVED}
        derived["chosen"] = asdict(self.chosen)
        plain: dict[str, Any] = clean(asdict(self) | derived)
        return plain


# Properties that `asdict` leaves out and that readers of the JSON need.
_DERIVED = (
    "clients",
    "examples",
    "fedavg_gap",
    "largest_weight",
    "noise_factor",
    "missing",
    "deficit",
    "surplus",
)
