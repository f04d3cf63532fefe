"""Sums of a cohort's updates, taken while replies arrive, so that replies need not be kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, Capabilities, ask
from fedshift.engine.backends import Block, Reply
from fedshift.engine.checks.replies import finite
from fedshift.errors import TrainingError
from fedshift.server.combine import SUMMED
from fedshift.tree import Params, Parts, accumulate, compact, same_form, sum_type

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Share(NamedTuple):
    """The sums over some of a cohort's clients, made in the process that trained them.

    clients, ascending; totals: part -> sums in float64; kinds: the types of what was summed.
    """

    clients: tuple[int, ...]
    totals: Parts
    kinds: Mapping[str, Mapping[str, torch.dtype]]


@dataclass(eq=False)
class Fold:
    """sum_i w_i v_i of some parts of the updates, in float64 and ascending client id.

    ids      [C] ascending, of those whose updates come
    weights  part -> w [C]; a client of weight exactly 0 is left out, because 0 * NaN is NaN

    The bits are those of `fedshift.tree.weighted_sum` over the stacked cohort, however many replies
    are added at a time. Sums made in other processes are added at the end, by ascending client, in
    whatever order they arrived. The totals are float64, twice a float32 model; so is every share.
    """

    ids: Tensor
    weights: Mapping[str, Tensor]
    _by: dict[str, dict[int, float]] = field(init=False, repr=False)
    _totals: dict[str, Params] = field(default_factory=dict, repr=False)
    _like: Parts = field(default_factory=dict, repr=False)
    _shares: list[Share] = field(default_factory=list, repr=False)
    _elsewhere: dict[int, Parts] = field(default_factory=dict, repr=False)
    _sent: dict[str, bool] = field(default_factory=dict, repr=False)
    _made: dict[int, dict[int, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # Most parts are summed by one and the same weights.
        known = {id(w): w for w in self.weights.values()}
        ids = self.ids.tolist()
        by = {k: dict(zip(ids, w.double().tolist(), strict=True)) for k, w in known.items()}
        self._by = {part: by[id(w)] for part, w in self.weights.items()}

    @staticmethod
    def of(stage: Algorithm, server: Parts, ids: Tensor, weights: Tensor) -> Fold:
        """The sums that a method's server asks for over a cohort; none where it asks for none."""
        cohort = {"id": ids, "weight": weights}
        return Fold(ids, ask(stage, Capabilities.sums, server, cohort))

    def take(self, replies: Sequence[Reply]) -> tuple[Reply, ...]:
        """Add replies, in ascending client id after those added before; the same without the parts
        that were added here or elsewhere. Raises TrainingError for a part that is not shaped like
        the first client's.
        """
        own = [reply for reply in replies if reply.client not in self._elsewhere]
        for part in self.weights if own else ():
            if self._alike(part, part in own[0].update, f"client {own[0].client}"):
                self._add(part, own)
        return tuple(Reply(r.client, self._rest(r.update), r.changed, r.t) for r in replies)

    # Of numbers alone: calls need not note what a gradient would need.
    @torch.inference_mode()
    def take_block(self, block: Block) -> None:
        """Add clients that were trained together, none of them summed elsewhere, in the order of
        `take`, without a look at each client's form: it is the block's.
        """
        turns = sorted(range(len(block.clients)), key=block.clients.__getitem__)
        for part in self.weights:
            if not self._alike(part, part in block.updates, f"client {block.clients[turns[0]]}"):
                continue
            self._begin(part, {k: v[0] for k, v in block.updates[part].items()})
            by, tensors = self._by[part], self._tensors(part)
            used = [(i, tensors[block.clients[i]]) for i in turns if by[block.clients[i]]]
            weights = [w for _, w in used]
            for name, total in self._totals[part].items():
                rows = block.updates[part][name].unbind()
                accumulate(total, [rows[i] for i, _ in used], weights)

    def share(self) -> Share:
        """What was added so far, for the fold of another process."""
        kinds = {part: {k: v.dtype for k, v in like.items()} for part, like in self._like.items()}
        return Share(tuple(self.ids.tolist()), self._totals, kinds)

    def enter(self, share: Share) -> None:
        """Take the sums over some clients, whose replies come without these parts.

        Raises TrainingError for parts other than others sent, or of another form.
        """
        like = {part: _likes(share, part) for part in share.totals}
        who = f"clients {', '.join(map(str, share.clients))}"
        for part in self.weights:
            self._alike(part, part in like, who)
        for part, tree in like.items():
            if not same_form(tree, self._like.setdefault(part, tree)):
                raise TrainingError(f'{who} sent updates with another "{part}"')
        self._elsewhere |= dict.fromkeys(share.clients, like)
        self._shares.append(share)
        self._shares.sort(key=lambda share: share.clients)

    @property
    def elsewhere(self) -> Mapping[int, Parts]:
        """Of clients whose updates were summed elsewhere: what was summed, by its form alone."""
        return self._elsewhere

    def together(self, clients: Sequence[int]) -> bool:
        """Whether all of these clients are of one share."""
        return any(set(clients).issubset(share.clients) for share in self._shares)

    def numbers(self, clients: Iterable[int]) -> dict[str, tuple[float, ...]]:
        """These clients' weights, part by part."""
        asked = tuple(clients)
        known = {id(by): tuple(by[i] for i in asked) for by in self._by.values()}
        return {part: known[id(by)] for part, by in self._by.items()}

    def telling(self, clients: Iterable[int]) -> frozenset[str]:
        """Parts in which every one of these clients has a weight: a number of theirs that is not
        finite then makes the sum not finite.
        """
        asked = tuple(clients)
        return frozenset(part for part, by in self._by.items() if all(by.get(i) for i in asked))

    def finite(self) -> bool:
        """True if all sums so far are finite and a float64 sum would reveal a term that is not."""
        kinds = {v.dtype for like in self._like.values() for v in like.values()}
        told = all(
            kind in REAL or not (kind.is_floating_point or kind.is_complex) for kind in kinds
        )
        return told and all(finite(v) for tree in self._totals.values() for v in tree.values())

    def parts(self) -> Parts:
        """The sums, in the type of what was summed, and by which weights; called once."""
        while self._shares:  # none is held on to while sums are cast
            self._join(self._shares.pop(0))
        found = {part: self._cast(part) for part in tuple(self._totals)}
        by = {part: self.weights[part] for part in found}
        return {**found, SUMMED: by} if found else {}

    def _join(self, share: Share) -> None:
        """Add the sums of a share; the first share's tensors become the totals."""
        for part, sums in share.totals.items():
            if part not in self._totals:  # as if they were added to 0
                self._totals[part] = dict(sums)
                continue
            for name, total in self._totals[part].items():
                total.add_(sums[name])

    def _alike(self, part: str, sent: bool, who: str) -> bool:
        """Whether a part is sent; TrainingError unless all send it or none."""
        if self._sent.setdefault(part, sent) != sent:
            raise TrainingError(f'{who} sent an update with another "{part}"')
        return sent

    def _rest(self, update: Parts) -> Parts:
        return {
            part: {k: compact(v) for k, v in tree.items()}
            for part, tree in update.items()
            if part not in self.weights
        }

    def _add(self, part: str, replies: Sequence[Reply]) -> None:
        self._begin(part, replies[0].update[part])
        like, by, tensors = self._like[part], self._by[part], self._tensors(part)
        for reply in replies:
            if not same_form(reply.update.get(part, {}), like):
                raise TrainingError(f'client {reply.client} sent an update with another "{part}"')
        used = [(r.update[part], tensors[r.client]) for r in replies if by[r.client]]
        weights = [w for _, w in used]
        for name, total in self._totals[part].items():
            accumulate(total, [tree[name] for tree, _ in used], weights)

    def _tensors(self, part: str) -> dict[int, Tensor]:
        """Each client's weight [], made on first use: not needed where other processes sum."""
        weights = self.weights[part]
        if id(weights) not in self._made:
            each = zip(self.ids.tolist(), weights.double().unbind(), strict=True)
            self._made[id(weights)] = dict(each)
        return self._made[id(weights)]

    def _begin(self, part: str, first: Params) -> None:
        """Sums of 0 where there are none yet."""
        if part in self._totals:
            return
        like = self._like.setdefault(part, {k: _blank(v) for k, v in first.items()})
        with torch.inference_mode(False):  # they are added to elsewhere, too
            self._totals[part] = {
                k: torch.zeros(v.shape, dtype=sum_type(v.dtype), device=v.device)
                for k, v in like.items()
            }

    def _cast(self, part: str) -> Params:
        # One by one, so that no more than the largest tensor is there twice.
        like, totals = self._like[part], self._totals.pop(part)
        return {k: totals.pop(k).to(v.dtype) for k, v in like.items()}


def _blank(v: Tensor, kind: torch.dtype | None = None) -> Tensor:
    """Zeros of the same shape, and type unless told another, which take one entry of memory.

    Zeros, not uninitialised memory: the gate may look at them.
    """
    kind = kind or v.dtype
    return v.new_zeros(1, dtype=kind).expand(v.shape) if v.dim() else v.new_zeros((), dtype=kind)


def _likes(share: Share, part: str) -> Params:
    """The form of what was summed."""
    return {k: _blank(v, share.kinds[part][k]) for k, v in share.totals[part].items()}
