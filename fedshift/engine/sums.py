"""Weighted sums of a cohort's updates, taken while replies arrive, so that none need be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedshift.engine.backends import Reply
from fedshift.server.combine import SUMMED
from fedshift.tree import Params, Parts, accumulate, compact, sum_type


@dataclass(eq=False)
class Sums:
    """sum_i w_i v_i of some parts of the updates, in float64 and in the order of `add`.

    weights  part -> w [C], of the clients `ids` [C]

    The bits are those of `fedshift.tree.weighted_sum` over the stacked cohort, if clients come by
    ascending id. A client of weight exactly 0 is left out, because 0 * NaN is NaN.
    """

    ids: Tensor
    weights: Mapping[str, Tensor]
    _totals: Parts = field(default_factory=dict, repr=False)
    _kinds: dict[str, dict[str, torch.dtype]] = field(default_factory=dict, repr=False)
    _of: dict[str, dict[int, Tensor]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Most parts share one tensor of weights: take it apart once.
        ids = self.ids.tolist()
        each = {
            id(w): dict(zip(ids, w.double().unbind(), strict=True)) for w in self.weights.values()
        }
        self._of = {part: each[id(w)] for part, w in self.weights.items()}

    def add(self, reply: Reply) -> Parts:
        """Add a reply, and return the parts of its update that are not summed."""
        rest: Parts = {}
        for part, tree in reply.update.items():
            if part not in self.weights:
                rest[part] = {k: compact(v) for k, v in tree.items()}
                continue
            if part not in self._totals:
                self._totals[part] = {
                    k: torch.zeros(v.shape, dtype=sum_type(v.dtype), device=v.device)
                    for k, v in tree.items()
                }
                self._kinds[part] = {k: v.dtype for k, v in tree.items()}
            w = self._of[part][reply.client]
            for name, v in tree.items() if w else ():
                accumulate(self._totals[part][name], (v,), (w,))
        return rest

    def parts(self) -> Parts:
        """The sums, each in the type of its terms, and the weights by which they were taken."""
        sums = {part: self._cast(part, tree) for part, tree in self._totals.items()}
        return {**sums, SUMMED: {part: self.weights[part] for part in sums}} if sums else {}

    def _cast(self, part: str, tree: Params) -> Params:
        return {k: v.to(self._kinds[part][k]) for k, v in tree.items()}
