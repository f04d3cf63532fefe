"""What clients' models say to queries, with one pass for all that they have in common.

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
from torch.nn import functional as F

from fedshift.model import Model
from fedshift.router.queries import read
from fedshift.tree import Params

Pair = tuple[Params, Params]
# Numbers of a table [B, clients, K] that is made at once: 32 MiB in float64.
TABLE = 2**22
# Queries on which it is tried whether a shared pass will do.
TRIED = 16


class Seen(NamedTuple):
    """The shared network's outputs for B queries, and what it gave to the clients' part [B, ...].

    inner is None where clients must be asked one by one.
    """

    out: Params
    inner: Tensor | None


@dataclass(frozen=True, eq=False)
class Heads:
    """The one module in which clients' models differ, and each client's tensors for it."""

    module: nn.Module
    model: Model
    own: Mapping[int, Pair]

    @classmethod
    def of(cls, net: nn.Module, shared: Pair, served: Mapping[int, Pair]) -> Heads | None:
        """Where they lie; None if models differ in several places, or somewhere in all of `net`."""
        names = _differing(shared, served)
        prefix = _common([k.split(".")[:-1] for k in names])
        if not prefix or any(not k.startswith(prefix) for k in _aliases(net, names)):
            return None
        module = net.get_submodule(prefix[:-1])
        needed = {k for k, _ in chain(module.named_parameters(), module.named_buffers())}
        own = {i: (_within(p, prefix), _within(b, prefix)) for i, (p, b) in served.items()}
        if any(needed != {*p, *b} for p, b in own.values()):
            return None
        return cls(module, Model(module), own)

    @cached_property
    def linear(self) -> bool:
        """Whether the module is a linear layer and nothing else."""
        return type(self.module) is nn.Linear

    def one(self, client: int, inner: Tensor) -> Tensor:
        """One client's logits [B, K]."""
        params, buffers = self.own[client]
        if self.linear:
            return F.linear(inner, params["weight"], params.get("bias"))
        return self.model(params, buffers, inner)["logits"]

    def many(self, clients: Sequence[int], inner: Tensor) -> Tensor:
        """Logits [B, K, clients]: one product where each is a linear layer."""
        if not self.linear:
            return torch.stack([self.one(i, inner) for i in clients], 2)
        layers = [self.own[i][0] for i in clients]
        weight = torch.stack([v["weight"] for v in layers], 1).flatten(0, 1)
        bias = (
            torch.stack([v["bias"] for v in layers], 1).flatten() if "bias" in layers[0] else None
        )
        return F.linear(inner, weight, bias).reshape(len(inner), -1, len(clients))


@dataclass(frozen=True, eq=False)
class Answers:
    """The class probabilities of clients' models.

    Where models differ in one module, as a classifier, and its output is the logits, a pass of the
    shared network gives what it is given, and each client's own is asked after that. Whether this
    holds is tried on the first queries, not assumed: a network may read its head's weights
    elsewhere. Clients with bodies of their own take a pass each for the queries that they are sent.
    """

    model: Model
    shared: Pair
    served: Mapping[int, Pair]
    _tried: list[bool] = field(default_factory=list, init=False, repr=False)

    @cached_property
    def one(self) -> bool:
        """Whether all clients serve the shared model."""
        return not _differing(self.shared, self.served)

    @cached_property
    def heads(self) -> Heads | None:
        return None if self.one else Heads.of(self.model.net, self.shared, self.served)

    def see(self, x: Tensor) -> Seen:
        """A pass of the shared network over one block of queries."""
        if self.heads is None or self._tried == [False]:
            return Seen(read(self.model, self.shared, x), None)
        calls: list[tuple[Any, Any, Any]] = []
        hook = self.heads.module.register_forward_hook(
            lambda _, args, more, out: calls.append((args, more, out)), with_kwargs=True
        )
        try:
            out = read(self.model, self.shared, x)
        finally:
            hook.remove()
        inner = _only_input(calls, out["logits"], len(x))
        if inner is not None and not self._tried:
            self._tried.append(self._as_plain(self.heads, x[:TRIED], inner[:TRIED]))
        return Seen(out, inner if self._tried == [True] else None)

    def _as_plain(self, heads: Heads, x: Tensor, inner: Tensor) -> bool:
        """Whether another client than the one of the shared pass says what its own pass says."""
        known = self.shared[0] | self.shared[1]
        for i, pair in self.served.items():
            if any(not torch.equal(v, known[k]) for part in pair for k, v in part.items()):
                with torch.no_grad():
                    plain = self.model(*pair, x)["logits"]
                    stacked = heads.many([i], inner)[..., 0]
                near = torch.finfo(plain.dtype).eps ** 0.5 * plain.abs().max()
                return bool(((stacked - plain).abs() <= near).all())
        return True

    def mixed(self, x: Tensor, seen: Seen, chosen: Tensor, share: Tensor) -> Tensor:
        """sum_j share_j P_j(y | x) over each query's clients chosen [B, k]: [B, K] float64."""
        with torch.no_grad():
            if self.one:
                return seen.out["logits"].double().softmax(1)
            if seen.inner is None or self.heads is None:
                return self._by_client(x, self._plain, chosen, share)
            if chosen.shape[1] == 1:
                return self._by_client(seen.inner, self.heads.one, chosen, share)
            return self._by_table(self.heads, seen.inner, chosen, share)

    def _plain(self, client: int, x: Tensor) -> Tensor:
        return self.model(*self.served[client], x)["logits"]

    def _by_client(
        self, x: Tensor, ask: Callable[[int, Tensor], Tensor], chosen: Tensor, share: Tensor
    ) -> Tensor:
        """Each client is asked once, for the queries that are sent to it."""
        flat = chosen.flatten()
        order, counts = flat.argsort(stable=True), torch.bincount(flat)
        rows, who = order // chosen.shape[1], counts.nonzero().flatten()
        pieces = torch.split(rows, counts[who].tolist())
        asked = zip(who.tolist(), pieces, strict=True)
        answers = [ask(i, x.index_select(0, some)) for i, some in asked]
        # Classes before queries: a softmax over few numbers that lie together is ten times slower.
        each = torch.cat(answers).T.contiguous().double().softmax(0).T
        answer = each * share.flatten()[order, None]
        return torch.zeros_like(answer[: len(x)]).index_add(0, rows, answer)

    def _by_table(self, heads: Heads, inner: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        """All clients that anything is sent to are asked for every query: it is one product."""
        whole = share.new_zeros(len(inner), int(chosen.max()) + 1).scatter(1, chosen, share)
        clients = (whole > 0).any(0).nonzero().flatten().tolist()
        classes = len(heads.one(clients[0], inner[:1])[0])
        most, answer = max(1, TABLE // (len(inner) * classes)), share.new_zeros(len(inner), classes)
        for start in range(0, len(clients), most):
            ids = clients[start : start + most]
            shares = heads.many(ids, inner).double().softmax(1)
            answer += torch.bmm(shares, whole[:, ids, None])[..., 0]
        return answer


def _differing(shared: Pair, served: Mapping[int, Pair]) -> set[str]:
    """Names whose tensor is another one for some client. Equal copies count: a look costs more."""
    own = shared[0] | shared[1]
    return {k for pair in served.values() for part in pair for k, v in part.items()
            if v is not own.get(k)}  # fmt: skip


def _common(paths: Sequence[Sequence[str]]) -> str:
    """The modules that all paths begin with, as a prefix "a.b."; empty where there are none."""
    same = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        same.append(f"{names[0]}.")
    return "".join(same)


def _aliases(net: nn.Module, names: set[str]) -> Iterator[str]:
    """All names of these tensors: a tied one has several."""
    tensors = list(chain(net.named_parameters(remove_duplicate=False),
                      net.named_buffers(remove_duplicate=False)))  # fmt: skip
    ids = {id(v) for k, v in tensors if k in names}
    return (k for k, v in tensors if id(v) in ids)


def _within(tree: Params, prefix: str) -> Params:
    return {k.removeprefix(prefix): v for k, v in tree.items() if k.startswith(prefix)}


def _only_input(calls: Sequence[tuple[Any, Any, Any]], logits: Tensor, rows: int) -> Tensor | None:
    """What the part was given, if it was called once, with a row per query, and gave the logits."""
    if len(calls) != 1:
        return None
    ((args, more, out),) = calls
    fits = out is logits and len(args) == 1 and not more and isinstance(args[0], Tensor)
    return args[0] if fits and args[0].ndim and len(args[0]) == rows else None
