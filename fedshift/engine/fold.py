"""Sums of a cohort's updates, taken while replies come in, so that replies can be let go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, Summing
from fedshift.engine.backends import Reply
from fedshift.engine.replies import finite
from fedshift.errors import TrainingError
from fedshift.server.combine import SUMMED
from fedshift.tree import Params, Parts, accumulate, same_form

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    _by: dict[str, dict[int, Tensor | None]] = field(init=False, repr=False)
    _totals: dict[str, Params] = field(default_factory=dict, repr=False)
    _like: Parts = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # Most parts are summed by one and the same weights.
        known = {id(w): w for w in self.weights.values()}
        by = {k: _by_client(self.ids, w.double()) for k, w in known.items()}
        self._by = {part: by[id(w)] for part, w in self.weights.items()}

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
        for part in self.weights:
            if part in replies[0].update:
                self._add(part, replies)
        return tuple(Reply(r.client, self._rest(r.update), r.changed, r.t) for r in replies)

    def telling(self, clients: Iterable[int]) -> frozenset[str]:
        """Parts of which none of these clients is left out: what is not finite in theirs leaves a
        sum that is not finite, either.
        """
        asked = tuple(clients)
        # Not `None in ...`, which would compare tensors.
        return frozenset(
            part for part, by in self._by.items() if all(by.get(i) is not None for i in asked)
        )

    def finite(self) -> bool:
        """Whether all sums are finite, so far, and of types whose sum in float64 tells of them."""
        kinds = {v.dtype for like in self._like.values() for v in like.values()}
        told = all(
            kind in REAL or not (kind.is_floating_point or kind.is_complex) for kind in kinds
        )
        return told and all(finite(v) for tree in self._totals.values() for v in tree.values())

    def parts(self) -> Parts:
        """The sums, in the type of what was summed, and by which weights; called once."""
        found = {part: self._cast(part) for part in tuple(self._totals)}
        by = {part: self.weights[part] for part in found}
        return {**found, SUMMED: by} if found else {}

    def _rest(self, update: Parts) -> Parts:
        return {
            part: {k: _own(v) for k, v in tree.items()}
            for part, tree in update.items()
            if part not in self.weights
        }

    def _add(self, part: str, replies: Sequence[Reply]) -> None:
        if part not in self._totals:
            self._begin(part, replies[0].update[part])
        like, by = self._like[part], self._by[part]
        for reply in replies:
            if not same_form(reply.update.get(part, {}), like):
                raise TrainingError(f'client {reply.client} sent an update with another "{part}"')
        used = [(reply.update[part], w) for reply in replies if (w := by[reply.client]) is not None]
        weights = [w for _, w in used]
        for name, total in self._totals[part].items():
            accumulate(total, [tree[name] for tree, _ in used], weights)

    def _begin(self, part: str, first: Params) -> None:
        self._totals[part] = {
            k: torch.zeros(v.shape, dtype=torch.float64, device=v.device) for k, v in first.items()
        }
        self._like[part] = {k: _empty(v) for k, v in first.items()}

    def _cast(self, part: str) -> Params:
        # One by one, so that no more than the largest tensor is there twice.
        like, totals = self._like[part], self._totals.pop(part)
        return {k: totals.pop(k).to(v.dtype) for k, v in like.items()}


def _empty(v: Tensor) -> Tensor:
    """A tensor of the same shape and type that takes one entry of memory."""
    return v.new_empty(1).expand(v.shape) if v.dim() else v.new_empty(())


def _own(v: Tensor) -> Tensor:
    """The tensor in memory of its own: a view would keep all that it came with alive."""
    return v if v.untyped_storage().nbytes() <= v.nbytes else v.clone()


def _by_client(ids: Tensor, weights: Tensor) -> dict[int, Tensor | None]:
    """Each client's weight; None for 0."""
    known = zip(ids.tolist(), weights.tolist(), weights.unbind(), strict=True)
    return {i: w if number != 0 else None for i, number, w in known}
