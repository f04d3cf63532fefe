"""What clients' models say to queries, with one pass for all that they have in common.

Shapes: B queries, N clients, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

    def logits(self, clients: Sequence[int], inner: Tensor) -> Tensor:
        """[B, len(clients), K]: one product where each is a linear layer."""
        if type(self.module) is not nn.Linear:
            return torch.stack([self.model(*self.own[i], inner)["logits"] for i in clients], 1)
        layers = [self.own[i][0] for i in clients]
        bias = torch.cat([v["bias"] for v in layers]) if "bias" in layers[0] else None
        told = F.linear(inner, torch.cat([v["weight"] for v in layers]), bias)
        return told.unflatten(-1, (len(clients), -1))


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
            self._tried.append(self._as_plain(self.heads, x[:2], inner[:2]))
        return Seen(out, inner if self._tried == [True] else None)

    def _as_plain(self, heads: Heads, x: Tensor, inner: Tensor) -> bool:
        """Whether another client than the one of the shared pass says what its own pass says."""
        own = chain(*(part.items() for part in self.shared))
        known = dict(own)
        for i, pair in self.served.items():
            if any(not torch.equal(v, known[k]) for part in pair for k, v in part.items()):
                with torch.no_grad():
                    plain = self.model(*pair, x)["logits"]
                    told = heads.logits([i], inner)[:, 0]
                near = torch.finfo(plain.dtype).eps ** 0.5
                return torch.allclose(told, plain, rtol=near, atol=near * float(plain.abs().max()))
        return True

    def _logits(self, clients: Sequence[int], x: Tensor, seen: Seen, rows: Any) -> Tensor:
        with torch.no_grad():
            if seen.inner is not None and self.heads is not None:
                return self.heads.logits(clients, seen.inner[rows])
            each = [self.model(*self.served[i], x[rows])["logits"] for i in clients]
        return torch.stack(each, 1)

    def of_some(self, x: Tensor, seen: Seen, chosen: Tensor, share: Tensor) -> Tensor:
        """sum_j share_j P_j(y | x) over each query's clients chosen [B, k]: [B, K] float64."""
        k, flat = chosen.shape[1], chosen.flatten()
        order = flat.argsort(stable=True)
        rows, share = order // k, share.flatten()[order, None]
        who, counts = flat[order].unique_consecutive(return_counts=True)
        asked = zip(who.tolist(), rows.split(counts.tolist()), strict=True)
        told = [self._logits([i], x, seen, places)[:, 0] for i, places in asked]
        answer = torch.cat(told).double().softmax(1) * share
        return torch.zeros_like(answer[: len(x)]).index_add(0, rows, answer) if k > 1 else (
            torch.empty_like(answer).index_copy(0, rows, answer)
        )

    def of_all(self, x: Tensor, seen: Seen, clients: Sequence[int], share: Tensor) -> Tensor:
        """sum_i share_i P_i(y | x) over these clients, share [B, len(clients)]: [B, K] float64."""
        classes = seen.out["logits"].shape[1]
        # Where each takes a pass of its own, a table of all would only hold memory.
        most = 1 if seen.inner is None else max(1, TABLE // (len(x) * classes))
        answer = torch.zeros(len(x), classes, dtype=torch.float64, device=share.device)
        for start in range(0, len(clients), most):
            ids = clients[start : start + most]
            told = self._logits(ids, x, seen, slice(None)).double().softmax(2)
            answer += torch.einsum("bn,bnk->bk", share[:, start : start + most], told)
        return answer


def _differing(shared: Pair, served: Mapping[int, Pair]) -> set[str]:
    """Names whose tensor is another one for some client. Equal copies count: a look costs more."""
    own = shared[0] | shared[1]
    return {k for pair in served.values() for part in pair for k, v in part.items()
            if v is not own.get(k)}  # fmt: skip


def _common(paths: Sequence[Sequence[str]]) -> str:
    """The modules' names that all paths begin with, as a prefix "a.b."; empty where there are none."""
    same = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        same.append(f"{names[0]}.")
    return "".join(same)


def _aliases(net: nn.Module, names: set[str]) -> Iterator[str]:
    """All names of these tensors: a tied one has several."""
    held = list(chain(net.named_parameters(remove_duplicate=False),
                      net.named_buffers(remove_duplicate=False)))  # fmt: skip
    ids = {id(v) for k, v in held if k in names}
    return (k for k, v in held if id(v) in ids)


def _within(tree: Params, prefix: str) -> Params:
    return {k.removeprefix(prefix): v for k, v in tree.items() if k.startswith(prefix)}


def _only_input(calls: Sequence[tuple[Any, Any, Any]], logits: Tensor, rows: int) -> Tensor | None:
    """What the part was given, if it was called once, with a row per query, and gave the logits."""
    if len(calls) != 1:
        return None
    (args, more, out), = calls
    fits = out is logits and len(args) == 1 and not more and isinstance(args[0], Tensor)
    return args[0] if fits and args[0].ndim and len(args[0]) == rows else None
