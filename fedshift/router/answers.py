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
from torch.nn import functional as F

from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.router.queries import Pair, check_served, read
from fedshift.tree import Params

Ask = Callable[[int, Tensor], Tensor]
# Most entries of a table [K, clients, B], so that it fits into the processor's cache.
TABLE = 2**18
# Probabilities below this are computed again in float64, because float32 ends at 1e-38.
TINY = 1e-30
# Number of queries on which the shared pass is compared with a client's whole pass.
TRIED = 16


class Seen(NamedTuple):
    """The shared network's outputs for B queries, and the input of the clients' module [B, ...].

    inner is None if each client's whole model must be run.
    """

    out: Params
    inner: Tensor | None


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

    @cached_property
    def linear(self) -> bool:
        """Whether the module is exactly a linear layer."""
        return type(self.module) is nn.Linear

    def one(self, client: int, inner: Tensor) -> Tensor:
        """One client's logits [B, K]."""
        params, buffers = self.tensors[client]
        if self.linear:
            return F.linear(inner, params["weight"], params.get("bias"))
        return self.model(params, buffers, inner)["logits"]

    def many(self, clients: Sequence[int], inner: Tensor) -> Tensor:
        """Logits [K, clients, B] of several clients; one matrix product for linear layers."""
        if not self.linear:
            return torch.stack([self.one(i, inner).T for i in clients], 1)
        layers = [self.tensors[i][0] for i in clients]
        weight = torch.stack([v["weight"] for v in layers], 1)
        logits = weight.flatten(0, 1) @ inner.T
        logits = logits.reshape(*weight.shape[:2], len(inner))
        if "bias" not in layers[0]:
            return logits
        return logits + torch.stack([v["bias"] for v in layers], 1)[..., None]

    def mixed(self, share: Tensor, inner: Tensor, dtype: torch.dtype) -> Tensor:
        """sum_j share_j P_j(y | x) for share [B, N], as [B, K]; computed in `dtype`."""
        clients = (share != 0).any(0).nonzero().flatten().tolist()
        classes = len(self.one(clients[0], inner[:1])[0])
        weights = share.T.to(dtype)
        answer = weights.new_zeros(classes, len(inner))
        # Some clients at a time: a table for all would leave the cache, or even fill the memory.
        most = max(1, TABLE // answer.numel())
        for start in range(0, len(clients), most):
            ids = clients[start : start + most]
            each = self.many(ids, inner).to(dtype).softmax(0)
            answer += each.mul_(weights[ids]).sum(1)
        return answer.T


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
        check_served(self.shared, self.served)

    @cached_property
    def one(self) -> bool:
        """Whether all clients serve the shared model."""
        return not _differing_names(self.shared, self.served)

    @cached_property
    def heads(self) -> Heads | None:
        return None if self.one else Heads.of(self.model.net, self.shared, self.served)

    def see(self, x: Tensor) -> Seen:
        """Run the shared network on one block of queries."""
        if self.heads is None or self._tried == [False]:
            return Seen(read(self.model, self.shared, x), None)
        calls: list[tuple[Any, Any, Any]] = []
        # A hook records the module's input, wherever in its forward the network calls it.
        hook = self.heads.module.register_forward_hook(
            lambda _, args, more, out: calls.append((args, more, out)), with_kwargs=True
        )
        try:
            out = read(self.model, self.shared, x)
        finally:
            hook.remove()
        inner = _only_input(calls, out["logits"], len(x))
        if inner is not None and not self._tried:
            self._tried.append(self._equals_plain_pass(self.heads, x[:TRIED], inner[:TRIED]))
        return Seen(out, inner if self._tried == [True] else None)

    def _equals_plain_pass(self, heads: Heads, x: Tensor, inner: Tensor) -> bool:
        """Whether `heads` gives the same logits as a whole pass of a client's model."""
        shared = self.shared[0] | self.shared[1]
        for i, pair in self.served.items():
            # Equal values could not show a difference: test with a client that has other ones.
            if any(not torch.equal(v, shared[k]) for part in pair for k, v in part.items()):
                with torch.no_grad():
                    plain = self.model(*pair, x)["logits"]
                    stacked = heads.many([i], inner)[:, 0].T
                # Equal in half of the digits, because the two ways add in different orders.
                near = torch.finfo(plain.dtype).eps ** 0.5 * plain.abs().max()
                return bool(((stacked - plain).abs() <= near).all())
        return True

    def chosen(self, x: Tensor, seen: Seen, client: Tensor) -> Tensor:
        """P_j(y | x) [B, K] float64, where client [B] has the j chosen for each query."""
        with torch.no_grad():
            if self.one:
                return seen.out["logits"].double().softmax(1)
            if seen.inner is None or self.heads is None:
                return self._by_one(self._plain, x, client)
            return self._by_one(self.heads.one, seen.inner, client)

    def mixed(self, x: Tensor, seen: Seen, share: Tensor) -> Tensor:
        """sum_j share_j P_j(y | x), share [B, N] of sum 1: [B, K] float64."""
        with torch.no_grad():
            if self.one:
                return seen.out["logits"].double().softmax(1)
            if seen.inner is None or self.heads is None:
                return self._by_client(x, share)
            dtype = torch.promote_types(seen.inner.dtype, torch.float32)
            answer = self.heads.mixed(share, seen.inner, dtype).double()
            small = (answer < TINY).any(1).nonzero().flatten()
            # A query far from all data has tiny probabilities, which float32 rounds to 0.
            if len(small) and dtype != torch.float64:
                answer[small] = self.heads.mixed(share[small], seen.inner[small], torch.float64)
            answer = answer / answer.sum(1, keepdim=True)
            # If a client's logits overflow, 0 * NaN is NaN even for a share of 0: compute such
            # queries again, without clients of share 0.
            if len(odd := (~answer.isfinite()).any(1).nonzero().flatten()):
                answer[odd] = self._by_client(x[odd], share[odd])
            return answer

    def _plain(self, client: int, x: Tensor) -> Tensor:
        return self.model(*self.served[client], x)["logits"]

    def _by_one(self, ask: Ask, given: Tensor, client: Tensor) -> Tensor:
        """Ask each client once, for all queries that are sent to it."""
        order, counts = client.argsort(stable=True), torch.bincount(client).tolist()
        pieces = enumerate(torch.split(given.index_select(0, order), counts))
        each = _few_softmax(torch.cat([ask(i, some) for i, some in pieces if len(some)]))
        return torch.empty_like(each).index_copy_(0, order, each)

    def _by_client(self, x: Tensor, share: Tensor) -> Tensor:
        """`mixed` by a pass of each client's model over the queries that it has a share of."""
        rows = {i: share[:, i].nonzero().flatten() for i in self.served}
        parts = [
            (some, share[some, i, None] * _few_softmax(self._plain(i, x.index_select(0, some))))
            for i, some in rows.items()
            if len(some)
        ]
        answer = share.new_zeros(len(x), parts[0][1].shape[1])
        for some, part in parts:
            answer.index_add_(0, some, part)
        return answer


def finite_answers(answers: Tensor) -> Tensor:
    """P(y | x) [B, K] itself. Raises InputError for a query on which a classifier overflows."""
    if not bool(answers.sum().isfinite()):
        i = int((~answers.isfinite()).any(1).nonzero()[0])
        raise InputError(
            f"query {i}: the classifier of a client that answers it overflows; its values are far "
            "from all that the network was trained on, or training diverged: leave it out"
        )
    return answers


def _few_softmax(logits: Tensor) -> Tensor:
    """Softmax over a few columns [B, K] in float64, computed on the transpose.

    torch takes ten times as long for a softmax over a short last axis.
    """
    return logits.T.contiguous().double().softmax(0).T


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
