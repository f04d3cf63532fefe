"""Answers of all clients' models from one pass, against a pass for each, written out plainly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.router.answers import TRIED
from fedshift.router.route import Router
from fedshift.seeds import generator
from fedshift.tree import Params
from support.federations import CLASSES, FEATURES
from support.routing import routed_model

N, B = 4, 30


def drawn(like: Params, prefixes: tuple[str, ...], seed: int) -> Params:
    """New values for the names with these prefixes; variances above 0."""
    source = generator(seed, "heads")
    return {
        k: torch.rand(v.shape, generator=source) + (0.1 if k.endswith("running_var") else -0.5)
        for k, v in like.items()
        if k.startswith(prefixes) and v.is_floating_point()
    }


def router_of(model: Model, *prefixes: str) -> Router:
    """N clients with their own values under these prefixes, buffers included."""
    params, buffers = model.init()
    served = {
        i: (params | drawn(params, prefixes, i), buffers | drawn(buffers, prefixes, i))
        for i in range(N)
    }
    return Router(model, (params, buffers), served, torch.tensor([5.0, 1, 3, 2]))


def plainly(router: Router, x: Tensor, k: int) -> Tensor:
    """A pass for each client; the k best clients' probabilities, renormalised."""
    r = router.scores(x).softmax(1)
    last = r.sort(1, descending=True).values[:, k - 1 : k]
    share = torch.where(r >= last, r, 0.0)
    each = [router.model(*router.served[i], x)["logits"].double().softmax(1) for i in range(N)]
    return torch.einsum("bn,nbk->bk", share / share.sum(1, keepdim=True), torch.stack(each))


class Net(nn.Module):
    """A body, a head and client logits; `how` says what else the forward pass does."""

    def __init__(self, how: str = "", head: nn.Module | None = None) -> None:
        super().__init__()
        self.how = how
        self.body = nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU())
        self.head = nn.Linear(7, CLASSES) if head is None else head
        self.clients = nn.Linear(7, N)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        z = self.clients(h)
        if self.how == "scaled inputs":
            h = h * self.head.weight.norm()
        logits = self.head(h)
        if self.how == "read by hand":
            logits = F.linear(h, self.head.weight, self.head.bias)
        if self.how == "changed after":
            logits = 2 * logits + x[:, :CLASSES]
        if self.how == "called twice":
            logits = logits + self.head(h.flip(1))
        if self.how == "named":
            logits = self.head(input=h)
        return {"logits": logits, "client_features": h, "client_logits": z}


def deep() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, CLASSES))


NETWORKS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "a linear head": (Net, ("head.",)),
    "a head without intercept": (lambda: Net(head=nn.Linear(7, CLASSES, bias=False)), ("head.",)),
    "a head of layers and statistics": (lambda: Net(head=deep()), ("head.",)),
    "part of a head": (lambda: Net(head=deep()), ("head.1.", "head.3.")),
    "a body of their own": (Net, ("body.", "head.")),
    "everything": (Net, ("",)),
    "two places": (Net, ("body.0.bias", "head.bias")),
    **{how: ((lambda how=how: Net(how)), ("head.",)) for how in (
        "scaled inputs", "read by hand", "changed after", "called twice", "named",
    )},
}  # fmt: skip


@pytest.mark.few(9)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("k", [1, 2, N])
def test_answers_are_those_of_a_pass_for_each_client(name: str, k: int) -> None:
    """Also where a shared pass would not do; client logits are the shared network's."""
    make, prefixes = NETWORKS[name]
    router = router_of(build(make, seed=0), *prefixes)
    x = torch.randn(B, FEATURES, generator=generator(1, "queries"))
    predicted = router.predict(x, k)
    assert float((predicted - plainly(router, x, k)).abs().max()) < 1e-6
    other = replace(router, served={i: router.served[(i + 1) % N] for i in range(N)})
    assert float((other.predict(x, k) - predicted).abs().max()) > 1e-3
    assert torch.equal(router.predict(x, k), predicted)


def test_tied_heads_are_answered_right() -> None:
    """The head's weight is the body's, too: nothing can be shared."""

    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(FEATURES, FEATURES, bias=False)
            self.head = nn.Linear(FEATURES, FEATURES)
            self.clients = nn.Linear(FEATURES, N)
            self.head.weight = self.body.weight

    x = torch.randn(B, FEATURES, generator=generator(1, "queries"))
    for prefixes in (("body.", "head."), ("head.",)):
        router = router_of(build(Tied, seed=0), *prefixes)
        for k in (1, N):
            assert float((router.predict(x, k) - plainly(router, x, k)).abs().max()) < 1e-6


def passes(router: Router, x: Tensor, mode: Any) -> int:
    """The number of queries that passed the first layer."""
    seen: list[int] = []
    hook = router.model.net.body[0].register_forward_pre_hook(lambda _, a: seen.append(len(a[0])))  # type: ignore[operator, index, union-attr]
    router.predict(x, mode)
    hook.remove()
    return sum(seen)


def test_a_shared_body_is_gone_through_once() -> None:
    """Apart from the queries of a trial, once per router."""
    x = torch.randn(B, FEATURES, generator=generator(1, "queries"))
    shared, apart = router_of(build(Net, seed=0), "head."), router_of(build(Net, seed=0), "body.")
    assert passes(shared, x, "hard") == B + TRIED
    assert [passes(shared, x, mode) for mode in ("hard", 2, "mixture")] == [B, B, B]
    assert [passes(apart, x, mode) for mode in ("hard", "mixture")] == [2 * B, (1 + N) * B]


def overflowing(client: int) -> Router:
    """The classifier of one client overflows on all queries."""
    router = router_of(routed_model(N), "head.")
    params, buffers = router.served[client]
    far = params | {"head.weight": torch.full_like(params["head.weight"], 3e38)}
    return replace(router, served=dict(router.served) | {client: (far, buffers)})


def test_a_client_that_overflows_spoils_its_own_queries_alone() -> None:
    x = 10 * torch.randn(B, FEATURES, generator=generator(1, "queries"))
    whole, broken = router_of(routed_model(N), "head."), overflowing(2)
    for k in (1, 2, 3):
        routed = (whole.route(x, k).clients == 2).any(1)
        assert bool(routed.any()) or k == 1
        others = x[~routed]
        assert torch.allclose(
            broken.predict(others, k), whole.predict(others, k), rtol=0, atol=1e-7
        )
        if bool(routed.any()):
            first = int(routed.nonzero()[0])
            with pytest.raises(InputError, match=f"query {first}: the classifier of a client"):
                broken.predict(x, k)


@pytest.mark.parametrize("mode", ["hard", "mixture"])
def test_a_client_of_another_type_is_refused_by_name(mode: Any) -> None:
    router, x = router_of(Model(Net()), "head."), torch.randn(B, FEATURES)
    params, buffers = router.served[2]
    half = params | {"head.weight": params["head.weight"].bfloat16()}
    with pytest.raises(
        InputError, match=r'^client 2: "head.weight" is torch.bfloat16, and torch.f'
    ):
        replace(router, served={**router.served, 2: (half, buffers)}).predict(x, mode)
    assert router.predict(x, mode).isfinite().all()  # the control
