"""Weighted sums of a cohort's updates, taken while replies arrive, so that none need be kept."""

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

# Shapes and types of one part, alike for all clients.
PartLook = dict[str, tuple[torch.Size, torch.dtype]]
# Where a client's tensors are: (client, index of its block, row in the block).
Place = tuple[int, int, int]
# Types of which a float64 sum is not finite if one of the terms is not.
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False)
class RunningSums:
    """sum_i w_i v_i of some parts of the updates, in float64 and ascending client id.

    ids      [C] ascending, of those whose updates come
    weights  part -> w [C]; a client of weight exactly 0 is left out, because 0 * NaN is NaN

    The bits are those of `fedshift.tree.weighted_sum` over the stacked cohort, however many replies
    are added at a time: floating-point addition depends on the order, so the order is fixed. Sums
    that other processes made wait until the end, and are added by ascending client, whatever the
    order in which they arrived. Totals are float64, and take twice the memory of a float32 model;
    so does each sum from another process.
    """

    ids: Tensor
    weights: Mapping[str, Tensor]
    totals: dict[str, Params] = field(default_factory=dict, repr=False)
    _weight_of: dict[str, dict[int, float]] = field(init=False, repr=False)
    # The look of each part, from the first client; None if that client sent no such part.
    _looks: dict[str, PartLook | None] = field(default_factory=dict, repr=False)
    _from_processes: list[Block] = field(default_factory=list, repr=False)
    _tensors: dict[int, dict[int, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # Most parts share one tensor of weights: read its numbers once.
        rows = {id(w): w for w in self.weights.values()}
        ids = self.ids.tolist()
        each = {k: dict(zip(ids, w.double().tolist(), strict=True)) for k, w in rows.items()}
        self._weight_of = {part: each[id(w)] for part, w in self.weights.items()}

    @staticmethod
    def of(
        stage: Algorithm, server: Parts, ids: Tensor, weights: Tensor, cap: float = 1.0
    ) -> RunningSums:
        """Empty sums over a cohort, of the parts that the method's server needs sums of."""
        bound = torch.tensor(cap, dtype=torch.float64)
        cohort = {"id": ids, "weight": weights, "cap": bound}
        return RunningSums(ids, ask(stage, Capabilities.sums, server, cohort))

    def add(self, blocks: Sequence[Block]) -> list[Block]:
        """Add blocks, and return them without the parts that were summed.

        Clients must come in ascending id, after those added before. Sums that a block brings from
        another process are set aside until `parts`. Raises TrainingError for a part that does not
        look like the first client's.
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
        # Equal looks become one object: with thousands of clients, they would take memory.
        like = blocks[0].look if blocks else {}
        looks = [like if block.look == like else block.look for block in blocks]
        return [
            Block(block.clients, self._rest(block), block.changed, block.t, look)
            for block, look in zip(blocks, looks, strict=True)
        ]

    def numbers(self, clients: Iterable[int]) -> dict[str, tuple[float, ...]]:
        """The weights of these clients, by part."""
        asked = tuple(clients)
        each = {id(by): tuple(by[i] for i in asked) for by in self._weight_of.values()}
        return {part: each[id(by)] for part, by in self._weight_of.items()}

    def revealing(self, clients: Iterable[int]) -> frozenset[str]:
        """Parts whose sum shows whether any of these clients sent a number that is not finite.

        That needs a weight other than 0 for each of them: others are left out of the sum.
        """
        asked = tuple(clients)
        weights = self._weight_of.items()
        return frozenset(part for part, by in weights if all(by.get(i) for i in asked))

    def finite(self) -> bool:
        """True if all partial sums are finite and a float64 sum would reveal a non-finite term."""
        kinds = {kind for look in self._looks.values() if look for _, kind in look.values()}
        revealed = all(
            kind in REAL or not (kind.is_floating_point or kind.is_complex) for kind in kinds
        )
        return revealed and all(finite(v) for tree in self.totals.values() for v in tree.values())

    def parts(self) -> Parts:
        """The sums, each in the type of its terms, and the sums of weights. Call once."""
        self._from_processes.sort(key=lambda block: block.clients)
        while self._from_processes:  # popped, so that each is freed before the sums are cast
            self._join(self._from_processes.pop(0))
        sums = {part: self._cast(part) for part in tuple(self.totals)}
        by = {part: self.weights[part] for part in sums}
        return {**sums, SUMMED: by} if sums else {}

    def _join(self, block: Block) -> None:
        """Add the sums of another process."""
        for part in self.weights:
            if self._looks.setdefault(part, block.look.get(part)) != block.look.get(part):
                clients = ", ".join(map(str, block.clients))
                raise TrainingError(f'clients {clients} sent updates with another "{part}"')
        for part, sums in block.sums.items():
            if part not in self.totals:  # 0 + x is x: take the tensors, and copy nothing
                self.totals[part] = dict(sums)
                continue
            for name, total in self.totals[part].items():
                total.add_(sums[name])

    # No gradient is ever taken of sums, and without its bookkeeping small additions are faster.
    @torch.inference_mode()
    def _add(self, part: str, blocks: Sequence[Block]) -> None:
        trees = [block.updates[part] for block in blocks]
        by, tensors = self._weight_of[part], self._weight_tensors(part)
        # Weight 0 is left out, not multiplied: 0 * NaN is NaN.
        terms = [place for place in _places(blocks) if by[place[0]]]
        weights = [tensors[client] for client, _, _ in terms]
        for name, total in self.totals[part].items():
            accumulate(total, _rows(blocks, [tree[name] for tree in trees], terms), weights)

    def _weight_tensors(self, part: str) -> dict[int, Tensor]:
        """Each client's weight as a tensor []; made on first use, since workers may do all sums."""
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
        # One tensor at a time, so that only one exists in both types.
        totals, look = self.totals.pop(part), self._looks[part]
        assert look is not None  # a total is made only for a part that was sent
        return {name: totals.pop(name).to(kind) for name, (_, kind) in look.items()}


@torch.inference_mode(False)
def _zeros(look: PartLook, first: Params) -> Params:
    """Totals of 0, on the device of the first update.

    Made outside of inference mode, because the server writes to them later.
    """
    return {
        k: torch.zeros(shape, dtype=sum_type(kind), device=first[k].device)
        for k, (shape, kind) in look.items()
    }


def join_blocks(blocks: Sequence[Block]) -> Block:
    """One block of all clients, ascending; no process may have summed any of them."""
    updates = stack_blocks(blocks, [block.updates for block in blocks])
    changed = stack_blocks(blocks, [block.changed for block in blocks])
    clients = tuple(client for client, _, _ in _places(blocks))
    return Block.of(clients, updates, changed, blocks[0].t)._replace(look=blocks[0].look)


def stack_blocks(blocks: Sequence[Block], trees: Sequence[Parts]) -> Parts:
    """Tensors [C, ...] of all clients, ascending, also where C is 1.

    trees: of each block, what is stacked (its updates, or its changed states). Raises InputError
    for updates that do not look alike.
    """
    like, places = blocks[0].look, _places(blocks)
    if any(block.look is not like and block.look != like for block in blocks):
        # This raises, and names the part.
        stack([one.updates for block in blocks for one in block.each()])
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
    """One tensor of each client at these places, [...] each; leaves: that tensor of each block."""
    rows = [block.rows(leaf) for block, leaf in zip(blocks, leaves, strict=True)]
    return [rows[b][row] for _, b, row in places]
