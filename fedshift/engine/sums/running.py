"""Sums of a cohort's updates, taken while replies arrive, so that replies need not be kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, Capabilities, ask
from fedshift.engine.backends import Block
from fedshift.engine.checks.replies import finite
from fedshift.errors import TrainingError
from fedshift.server.combine import SUMMED
from fedshift.tree import Params, Parts, accumulate, compact, stack, sum_type

# How each client's leaves of one part look.
PartLook = dict[str, tuple[torch.Size, torch.dtype]]
# A client, its block, and its row there.
Place = tuple[int, int, int]
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False)
class RunningSums:
    """sum_i w_i v_i of some parts of the updates, in float64 and ascending client id.

    ids      [C] ascending, of those whose updates come
    weights  part -> w [C]; a client of weight exactly 0 is left out, because 0 * NaN is NaN

    The bits are those of `fedshift.tree.weighted_sum` over the stacked cohort, however many replies
    are added at a time. Sums made in other processes are added at the end, by ascending client, in
    whatever order they arrived. The totals are float64, twice a float32 model; so are these sums.
    """

    ids: Tensor
    weights: Mapping[str, Tensor]
    totals: dict[str, Params] = field(default_factory=dict, repr=False)
    _weight_of: dict[str, dict[int, float]] = field(init=False, repr=False)
    # As what was added of each part looked; None: the first client sent no such part.
    _looks: dict[str, PartLook | None] = field(default_factory=dict, repr=False)
    _from_processes: list[Block] = field(default_factory=list, repr=False)
    _tensors: dict[int, dict[int, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # Most parts are summed by one and the same weights.
        rows = {id(w): w for w in self.weights.values()}
        ids = self.ids.tolist()
        each = {k: dict(zip(ids, w.double().tolist(), strict=True)) for k, w in rows.items()}
        self._weight_of = {part: each[id(w)] for part, w in self.weights.items()}

    @staticmethod
    def of(
        stage: Algorithm, server: Parts, ids: Tensor, weights: Tensor, cap: float = 1.0
    ) -> RunningSums:
        """The sums that a method's server asks for over a cohort; none where it asks for none."""
        bound = torch.tensor(cap, dtype=torch.float64)
        cohort = {"id": ids, "weight": weights, "cap": bound}
        return RunningSums(ids, ask(stage, Capabilities.sums, server, cohort))

    def add(self, blocks: Sequence[Block]) -> list[Block]:
        """Add blocks, in ascending client id after those added before; return what is left of them.

        Where a block brings sums that another process made, these are added at the end. Raises
        TrainingError for a part that does not look like the first client's.
        """
        here = [block for block in blocks if not block.sums]
        self._from_processes += [block for block in blocks if block.sums]
        for part in self.weights if here else ():
            look = self._looks.setdefault(part, here[0].look.get(part))
            for block in here:
                if block.look.get(part) != look:
                    client = min(block.clients)
                    raise TrainingError(f'client {client} sent an update with another "{part}"')
            if look is not None and part not in self.totals:
                self.totals[part] = _zeros(look, here[0].updates[part])
            if look:
                self._add(part, here)
        like = blocks[0].look if blocks else {}  # one object where they are equal: less memory
        looks = [like if block.look == like else block.look for block in blocks]
        return [
            Block(block.clients, self._rest(block), block.changed, block.t, look)
            for block, look in zip(blocks, looks, strict=True)
        ]

    def numbers(self, clients: Iterable[int]) -> dict[str, tuple[float, ...]]:
        """These clients' weights, part by part."""
        asked = tuple(clients)
        each = {id(by): tuple(by[i] for i in asked) for by in self._weight_of.values()}
        return {part: each[id(by)] for part, by in self._weight_of.items()}

    def revealing(self, clients: Iterable[int]) -> frozenset[str]:
        """Parts in which every one of these clients has a weight: a number of theirs that is not
        finite then makes the sum not finite.
        """
        asked = tuple(clients)
        weights = self._weight_of.items()
        return frozenset(part for part, by in weights if all(by.get(i) for i in asked))

    def finite(self) -> bool:
        """True if all sums so far are finite and a float64 sum would reveal a term that is not."""
        kinds = {kind for look in self._looks.values() if look for _, kind in look.values()}
        revealed = all(
            kind in REAL or not (kind.is_floating_point or kind.is_complex) for kind in kinds
        )
        return revealed and all(finite(v) for tree in self.totals.values() for v in tree.values())

    def parts(self) -> Parts:
        """The sums, in the type of what was summed, and by which weights; called once."""
        self._from_processes.sort(key=lambda block: block.clients)
        while self._from_processes:  # so that none stays in memory while sums are cast
            self._join(self._from_processes.pop(0))
        sums = {part: self._cast(part) for part in tuple(self.totals)}
        by = {part: self.weights[part] for part in sums}
        return {**sums, SUMMED: by} if sums else {}

    def _join(self, block: Block) -> None:
        """Add the sums of another process; the tensors of the first become the totals."""
        for part in self.weights:
            if self._looks.setdefault(part, block.look.get(part)) != block.look.get(part):
                clients = ", ".join(map(str, block.clients))
                raise TrainingError(f'clients {clients} sent updates with another "{part}"')
        for part, sums in block.sums.items():
            if part not in self.totals:  # as if they were added to 0
                self.totals[part] = dict(sums)
                continue
            for name, total in self.totals[part].items():
                total.add_(sums[name])

    # Of numbers alone: calls need not note what a gradient would need.
    @torch.inference_mode()
    def _add(self, part: str, blocks: Sequence[Block]) -> None:
        trees = [block.updates[part] for block in blocks]
        by, tensors = self._weight_of[part], self._weight_tensors(part)
        terms = [place for place in _places(blocks) if by[place[0]]]  # without those of weight 0
        weights = [tensors[client] for client, _, _ in terms]
        for name, total in self.totals[part].items():
            accumulate(total, _rows(blocks, [tree[name] for tree in trees], terms), weights)

    def _weight_tensors(self, part: str) -> dict[int, Tensor]:
        """Each client's weight [], made on first use: not needed where other processes sum."""
        weights = self.weights[part]
        if id(weights) not in self._tensors:
            each = zip(self.ids.tolist(), weights.double().unbind(), strict=True)
            self._tensors[id(weights)] = dict(each)
        return self._tensors[id(weights)]

    def _rest(self, block: Block) -> Parts:
        return {
            part: {k: compact(v) for k, v in tree.items()}
            for part, tree in block.updates.items()
            if part not in self.weights
        }

    def _cast(self, part: str) -> Params:
        # One by one, so that no more than the largest tensor is there twice.
        totals, look = self.totals.pop(part), self._looks[part]
        assert look is not None  # there is a total only of what was sent
        return {name: totals.pop(name).to(kind) for name, (_, kind) in look.items()}


@torch.inference_mode(False)
def _zeros(look: PartLook, first: Params) -> Params:
    """Sums of 0 where the first are; ordinary tensors: the server goes on with them."""
    return {
        k: torch.zeros(shape, dtype=sum_type(kind), device=first[k].device)
        for k, (shape, kind) in look.items()
    }


def joined(blocks: Sequence[Block]) -> Block:
    """One block of all clients, ascending, of blocks that nothing was summed of elsewhere."""
    updates = stacked(blocks, [block.updates for block in blocks])
    changed = stacked(blocks, [block.changed for block in blocks])
    clients = tuple(client for client, _, _ in _places(blocks))
    return Block.of(clients, updates, changed, blocks[0].t)._replace(look=blocks[0].look)


def stacked(blocks: Sequence[Block], trees: Sequence[Parts]) -> Parts:
    """Leaves [C, ...] of all clients, ascending, also where C is 1; trees: what each block has.

    Raises InputError for updates that do not look alike.
    """
    like, places = blocks[0].look, _places(blocks)
    if any(block.look is not like and block.look != like for block in blocks):
        stack([reply.update for block in blocks for reply in block.replies()])  # names the part
    return {
        part: {k: torch.stack(_rows(blocks, [t[part][k] for t in trees], places)) for k in tree}
        for part, tree in trees[0].items()
    }


def _places(blocks: Sequence[Block]) -> list[Place]:
    return sorted(
        (client, b, row)
        for b, block in enumerate(blocks)
        for row, client in enumerate(block.clients)
    )


def _rows(
    blocks: Sequence[Block], leaves: Sequence[Tensor], places: Iterable[Place]
) -> list[Tensor]:
    """A leaf of the clients at these places, [...] each; leaves: what each block has of it."""
    rows = [block.rows(leaf) for block, leaf in zip(blocks, leaves, strict=True)]
    return [rows[b][row] for _, b, row in places]
