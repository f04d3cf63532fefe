"""Sums of a cohort's updates, taken while replies come in, so that replies can be let go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, Summing
from fedshift.engine.backends import Reply
from fedshift.errors import TrainingError
from fedshift.server.combine import SUMMED
from fedshift.tree import Params, Parts, accumulate


@dataclass(eq=False)
class Fold:
    """sum_i w_i v_i of some parts of the updates, in float64 and ascending client id.

    ids      [C] ascending, of those whose updates come
    weights  part -> w [C]; a client of weight exactly 0 is left out, because 0 * NaN is NaN

    The bits are those of `fedshift.tree.weighted_sum` over the stacked cohort, however many replies
    are added at a time. A fold is held as float64 totals: twice a model of float32.
    """

    ids: Tensor
    weights: Mapping[str, Tensor]
    _totals: dict[str, Params] = field(default_factory=dict, repr=False)
    _like: Parts = field(default_factory=dict, repr=False)

    @staticmethod
    def of(stage: Algorithm, server: Parts, ids: Tensor, weights: Tensor) -> Fold:
        """The sums that a method's server asks for over a cohort; none where it asks for none."""
        wanted = (
            stage.sums(server, {"id": ids, "weight": weights}) if isinstance(stage, Summing) else {}
        )
        return Fold(ids, wanted)

    def take(self, replies: Sequence[Reply]) -> tuple[Reply, ...]:
        """Add replies, in ascending client id after those added before; the same without the parts
        that were added. Raises TrainingError for a part that is not shaped like the first client's.
        """
        places = torch.searchsorted(self.ids, torch.tensor([r.client for r in replies]))
        for part, weights in self.weights.items():
            if part in replies[0].update:
                self._add(part, replies, weights.double()[places])
        return tuple(r._replace(update=self._rest(r.update)) for r in replies)

    def parts(self) -> Parts:
        """The sums, in the type of what was summed, and by which weights; called once."""
        found = {part: self._cast(part) for part in tuple(self._totals)}
        by = {part: self.weights[part] for part in found}
        return {**found, SUMMED: by} if found else {}

    def _rest(self, update: Parts) -> Parts:
        return {part: tree for part, tree in update.items() if part not in self.weights}

    def _add(self, part: str, replies: Sequence[Reply], weights: Tensor) -> None:
        if part not in self._totals:
            self._begin(part, replies[0].update[part])
        form = _form(self._like[part])
        for reply in replies:
            if _form(reply.update.get(part, {})) != form:
                raise TrainingError(f'client {reply.client} sent an update with another "{part}"')
        used = [i for i, w in enumerate(weights.tolist()) if w != 0]
        by = [weights[i] for i in used]
        for name, total in self._totals[part].items():
            rows = [replies[i].update[part][name].reshape(-1) for i in used]
            accumulate(total, rows, by)

    def _begin(self, part: str, first: Params) -> None:
        self._totals[part] = {
            k: torch.zeros(v.numel(), dtype=torch.float64, device=v.device)
            for k, v in first.items()
        }
        self._like[part] = {k: _empty(v) for k, v in first.items()}

    def _cast(self, part: str) -> Params:
        # One by one, so that no more than the largest tensor is there twice.
        like, totals = self._like[part], self._totals.pop(part)
        return {k: totals.pop(k).to(v.dtype).view(v.shape) for k, v in like.items()}


def _empty(v: Tensor) -> Tensor:
    """A tensor of the same shape and type that takes one entry of memory."""
    return v.new_empty(1).expand(v.shape) if v.dim() else v.new_empty(())


def _form(tree: Params) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(k, v.shape, v.dtype) for k, v in sorted(tree.items())]
