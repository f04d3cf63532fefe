"""The answers of clients' models to queries, with one pass through the layers that they share.

Shapes: B queries, N clients, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedshift.errors import InputError, shown
from fedshift.model import Model
from fedshift.router.sight import Pair, read
from fedshift.tree import Params

# Number of queries on which the shared pass is compared with a client's whole pass.
TRIED = 16
Rows = Tensor | slice
Ask = Callable[[int, Rows], Tensor]


class Seen(NamedTuple):
    """The shared network's outputs for B queries, and a client's logits [b, K] for some of them.

    ask: called with the client's id and the rows [b] of its queries.
    """

    out: Params
    ask: Ask


@dataclass(frozen=True, eq=False)
class Heads:
    """The one module in which clients' models differ, and each client's tensors for it."""

    module: nn.Module
    model: Model
    tensors: Mapping[int, Pair]

    @classmethod
    def of(cls, net: nn.Module, shared: Pair, served: Mapping[int, Pair]) -> Heads | None:
        """The module in which models differ; None for several, or if all of the network differs."""
        names = _differing_names(shared, served)
        prefix = _common_prefix([k.split(".")[:-1] for k in names])
        if not prefix or any(not k.startswith(prefix) for k in _aliases(net, names)):
            return None
        module = net.get_submodule(prefix[:-1])
        needed = {k for k, _ in chain(module.named_parameters(), module.named_buffers())}
        tensors = {
            i: (_entries_within(p, prefix), _entries_within(b, prefix))
            for i, (p, b) in served.items()
        }
        if any(needed != {*p, *b} for p, b in tensors.values()):
            return None
        return cls(module, Model(module), tensors)

    def logits(self, client: int, inner: Tensor) -> Tensor:
        """One client's logits [b, K] for the module's inputs."""
        return self.model(*self.tensors[client], inner)["logits"]


@dataclass(frozen=True, eq=False)
class Answers:
    """The class probabilities of clients' models.

    If models differ in one module only, such as the classifier, and its output is the logits, then
    one pass of the shared network gives that module's input, to which each client's module is
    applied. This is tested on the first queries, not assumed, because a network may use its head's
    weights elsewhere as well. Otherwise each client's model takes a whole pass over the queries
    that are sent to it.
    """

    model: Model
    shared: Pair
    served: Mapping[int, Pair]
    _tried: list[bool] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise InputError if a client's tensor has another type than the shared network's."""
        types = {k: v.dtype for part in self.shared for k, v in part.items()}
        for i, pair in self.served.items():
            for k, v in chain(pair[0].items(), pair[1].items()):
                if types.get(k, v.dtype) != v.dtype:
                    raise InputError(
                        f'client {i}: "{shown(k)}" is {v.dtype}, and {types[k]} in the shared '
                        f"network; give the client's as v.to({types[k]})"
                    )

    @cached_property
    def one(self) -> bool:
        """Whether all clients serve the shared model."""
        return not _differing_names(self.shared, self.served)

    @cached_property
    def heads(self) -> Heads | None:
        return None if self.one else Heads.of(self.model.net, self.shared, self.served)

    def see(self, x: Tensor) -> Seen:
        """Run the shared network on one block of queries."""

        def plain(client: int, rows: Rows) -> Tensor:
            return self.model(*self.served[client], x[rows])["logits"]

        heads = self.heads
        if heads is None or self._tried == [False]:
            return Seen(read(self.model, self.shared, x), plain)
        calls: list[tuple[Any, Any, Any]] = []
        # A hook records the module's input, wherever in its forward the network calls it.
        hook = heads.module.register_forward_hook(
            lambda _, args, more, out: calls.append((args, more, out)), with_kwargs=True
        )
        try:
            out = read(self.model, self.shared, x)
        finally:
            hook.remove()
        inner = _only_input(calls, out["logits"], len(x))
        if inner is None:
            return Seen(out, plain)

        def by_head(client: int, rows: Rows) -> Tensor:
            return heads.logits(client, inner[rows])

        if not self._tried:
            self._tried.append(self._agree(plain, by_head, min(TRIED, len(x))))
        return Seen(out, by_head if self._tried == [True] else plain)

    def _agree(self, plain: Ask, by_head: Ask, count: int) -> bool:
        """Whether the shared pass gives the same logits as a whole pass of a client's model."""
        shared, rows = self.shared[0] | self.shared[1], torch.arange(count)
        for i, pair in self.served.items():
            # Equal values could not show a difference: test with a client that has other ones.
            if any(not torch.equal(v, shared[k]) for part in pair for k, v in part.items()):
                with torch.no_grad():
                    expected, logits = plain(i, rows), by_head(i, rows)
                # Equal in half of the digits, because the two may add in different orders.
                near = torch.finfo(expected.dtype).eps ** 0.5 * expected.abs().max()
                return bool(((logits - expected).abs() <= near).all())
        return True

    def mixed(self, seen: Seen, share: Tensor) -> Tensor:
        """sum_j share_j P_j(y | x), share [B, N] of sum 1: [B, K] float64.

        A client is asked for the queries of which it has a share. Raises InputError for a query on
        which such a client's classifier overflows.
        """
        with torch.no_grad():
            if self.one:
                answer = seen.out["logits"].double().softmax(1)
            else:
                answer = share.new_zeros(len(share), seen.out["logits"].shape[1])
                for i in (share != 0).any(0).nonzero().flatten().tolist():
                    part = share[:, i]
                    rows = slice(None) if bool(part.all()) else part.nonzero().flatten()
                    # torch takes ten times as long for a softmax over a short last axis.
                    each = seen.ask(i, rows).T.contiguous().double().softmax(0).T
                    answer[rows] += part[rows, None] * each
        if not bool(answer.sum().isfinite()):
            first = int((~answer.isfinite()).any(1).nonzero()[0])
            raise InputError(
                f"query {first}: the classifier of a client that answers it overflows; its values "
                "are far from all that the network was trained on, or training diverged: leave it "
                "out"
            )
        return answer


def _differing_names(shared: Pair, served: Mapping[int, Pair]) -> set[str]:
    """Names of tensors that are other objects for some client; comparing values would be slow."""
    common = shared[0] | shared[1]
    return {k for pair in served.values() for part in pair for k, v in part.items()
            if v is not common.get(k)}  # fmt: skip


def _common_prefix(paths: Sequence[Sequence[str]]) -> str:
    """The longest common beginning of module paths, as a prefix "a.b.", or ""."""
    same = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        same.append(f"{names[0]}.")
    return "".join(same)


def _aliases(net: nn.Module, names: set[str]) -> Iterator[str]:
    """All names of these tensors, since a tied tensor has several."""
    tensors = list(chain(net.named_parameters(remove_duplicate=False),
                      net.named_buffers(remove_duplicate=False)))  # fmt: skip
    ids = {id(v) for k, v in tensors if k in names}
    return (k for k, v in tensors if id(v) in ids)


def _entries_within(tree: Params, prefix: str) -> Params:
    return {k.removeprefix(prefix): v for k, v in tree.items() if k.startswith(prefix)}


def _only_input(calls: Sequence[tuple[Any, Any, Any]], logits: Tensor, rows: int) -> Tensor | None:
    """The module's input if it was called once, with a row per query, and returned the logits."""
    if len(calls) != 1:
        return None
    ((args, more, out),) = calls
    fits = out is logits and len(args) == 1 and not more and isinstance(args[0], Tensor)
    return args[0] if fits and args[0].ndim and len(args[0]) == rows else None
