"""Wrong or unusual uses of a network and of clients' data: right, refused, or silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Proximal, Term
from fedshift.client.oracles import Sam
from fedshift.data import ClientData, Examples, client_data, register
from fedshift.engine.run import Federation, Round, run
from fedshift.errors import FedshiftError
from fedshift.evaluation.scores import score
from fedshift.model import Model
from fedshift.seeds import Seeds


def clients() -> list[ClientData]:
    """Three clients of three classes."""
    source = torch.Generator().manual_seed(0)
    y = torch.arange(30) % 3
    return [
        client_data(torch.randn(30, 4, generator=source) + 2 * y[:, None], y, i) for i in range(3)
    ]


def net() -> nn.Sequential:
    """A small network, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def played(
    model: Model, given: list[ClientData] | None = None, loss: Term = CrossEntropy(), **local: Any
) -> Round:
    """The last of two rounds of FedAvg."""
    some = given or clients()
    federation = Federation(some, *model.init(), register(some, 3), Seeds.of(0))
    algorithm = FedAvg(model, objective=loss, local=Local(lr=0.1, batch=10, **local))
    return list(run(algorithm, federation, 2))[-1]


def outcome(use: Callable[[], str]) -> str:
    """The verdict that `use` returns (right or silent), or how it was refused."""
    try:
        return use()
    except FedshiftError as e:
        return f"refused: {e}"
    except Exception as e:
        return f"raw: {type(e).__name__}"


def verdict(wrong: bool, what: str) -> str:
    return f"silent: {what}" if wrong else "right"


def trap_requires_grad() -> str:
    """I set requires_grad=False on a layer, as for a torch optimiser."""

    def use() -> str:
        network = net()
        network[0].requires_grad_(False)
        before = network[0].weight.detach().clone()
        after = played(Model(network)).server["params"]["0.weight"]
        return verdict(not torch.equal(after, before), "the layer was trained")

    return outcome(use)


def trap_requires_grad_later() -> str:
    """I set requires_grad=False after I made the Model."""

    def use() -> str:
        network = net()
        model = Model(network)
        before = network[0].weight.detach().clone()
        network[0].requires_grad_(False)
        after = played(model).server["params"]["0.weight"]
        return verdict(not torch.equal(after, before), "the layer was trained")

    return outcome(use)


def trap_frozen_prefix() -> str:
    """I freeze "haed." with Local(frozen=...)."""
    return outcome(
        lambda: verdict(bool(played(Model(net()), frozen=("haed.",))), "nothing is frozen")
    )


def trap_only_as_text() -> str:
    """I give Local(only="0.") in place of a tuple."""
    # Letter by letter: "0" and "." are prefixes, too.
    return outcome(lambda: verdict(bool(played(Model(net()), only="02")), "text taken by letters"))


def trap_no_grad() -> str:
    """I call run within torch.no_grad()."""

    def use() -> str:
        model = Model(net())
        with torch.no_grad():
            after = played(model).server["params"]["0.weight"]
        return verdict(torch.equal(after, model.init()[0]["0.weight"]), "nothing was trained")

    return outcome(use)


class Centring(nn.Module):
    """Normalises in place, as many networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> Any:
        return self.body(x.sub_(1.0))


def trap_scoring_in_place() -> str:
    """My network normalises its inputs in place, and I score it on my test data."""

    def use() -> str:
        model, data = Model(Centring()), clients()[0]
        x = data.x.clone()
        score(model, *model.init(), Examples(data.x, data.y), 3)
        return verdict(not torch.equal(data.x, x), "the test data were changed")

    return outcome(use)


def trap_dry_pass_in_place() -> str:
    """My network normalises its inputs in place, and I run it."""

    def use() -> str:
        some = clients()
        x = some[0].x.clone()
        played(Model(Centring()), some)
        return verdict(not torch.equal(some[0].x, x), "the clients' examples were changed")

    return outcome(use)


def trap_second_pass_in_place() -> str:
    """My network normalises its inputs in place, and I train it by SAM."""

    class Plain(Centring):
        def forward(self, x: Tensor) -> Any:
            return self.body(x - 1.0)

    def use() -> str:
        both = [played(Model(m()), oracles=(Sam(0.1),)).server["params"] for m in (Centring, Plain)]
        moved = any(not torch.equal(v, both[1][k]) for k, v in both[0].items())
        return verdict(moved, "the second pass saw other inputs")

    return outcome(use)


def trap_layer_replaced() -> str:
    """I replace the last layer after I made the Model."""

    def use() -> str:
        network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
        model = Model(network)
        network[2] = net()[2]
        before = network[2].weight.detach().clone()
        after = played(model).server["params"]["2.weight"]
        return verdict(torch.equal(after, before), "the new layer was never trained")

    return outcome(use)


def trap_layer_replaced_and_scored() -> str:
    """I replace the last layer after I made the Model, and score the parameters that I give."""

    def use() -> str:
        network = net()
        model = Model(network)
        params, buffers = model.init()
        x = clients()[0].x
        right = model(params, buffers, x)["logits"]
        network[2] = nn.Linear(8, 3)
        got = model(params, buffers, x)["logits"]
        return verdict(not torch.equal(got, right), "the outputs are not the given parameters'")

    return outcome(use)


def trap_parameter_missing() -> str:
    """I forget a layer's parameters in the call of a Model."""

    def use() -> str:
        model = Model(net())
        params = {k: v for k, v in model.init()[0].items() if k != "0.weight"}
        model(params, {}, clients()[0].x)
        return verdict(True, "the module's own were taken")

    return outcome(use)


def trap_importance_in_the_middle() -> str:
    """I leave out examples by importance 0, wherever they are."""

    def use() -> str:
        some, w = clients(), torch.ones(30)
        w[:10] = 0.0
        masked = [c._replace(w=w) for c in some]
        without = [ClientData(c.x[10:], c.y[10:], c.w[10:], c.id) for c in some]
        one, two = (played(Model(net()), c).server["params"] for c in (masked, without))
        return verdict(
            any(not torch.equal(v, two[k]) for k, v in one.items()), "other examples were left out"
        )

    return outcome(use)


def trap_importance_negative() -> str:
    """An importance is negative."""

    def use() -> str:
        some = clients()
        w = torch.ones(30)
        w[3] = -1.0
        loss = played(Model(net()), [c._replace(w=w) for c in some]).loss
        return verdict(True, f"trained away from an example, loss {loss:.3g}")

    return outcome(use)


def trap_proximal_alone() -> str:
    """I give Proximal(0.1) as objective and forget the loss."""
    return outcome(
        lambda: verdict(played(Model(net()), loss=Proximal(0.1)).loss >= 0, "nothing to learn")
    )


def trap_nan_in_test_data() -> str:
    """My test data hold NaN."""

    def use() -> str:
        model, data = Model(net()), clients()[0]
        x = data.x.clone()
        x[0] = torch.nan
        got = score(model, *model.init(), Examples(x, data.y), 3)
        return verdict(True, f"accuracy {got.accuracy:.2f}")

    return outcome(use)


def trap_buffer_replaced() -> str:
    """My network counts its batches by self.seen = self.seen + 1."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.register_buffer("seen", torch.zeros(()).long())

        def forward(self, x: Tensor) -> Any:
            self.seen = self.seen + self.training
            return self.body(x)

    def use() -> str:
        count = int(played(Model(Counting())).server["buffers"]["seen"])
        return verdict(count != 6, f"{count} batches counted of 6")

    return outcome(use)
