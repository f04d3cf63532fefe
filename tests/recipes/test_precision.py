"""Local training in bfloat16: errors of gradients, what stays float32, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.client.local import Local, gradient_of, plan_all
from fedshift.client.objectives import CrossEntropy, Term, View
from fedshift.client.oracles import Precision
from fedshift.data import Batch
from fedshift.engine.backends import Backend, loop
from fedshift.engine.choosing.fastest import probe
from fedshift.engine.one_by_one import channels_last
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import Federation, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.models.lenet import LeNet
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.tree import Params, sub
from support.every_method import MAKE
from support.federations import CLASSES, FEATURES, make_clients, make_federation
from support.photographs import images
from support.rounds import last
from support.routing import routed_model

UNIT = 2.0**-8  # of bfloat16: rounding moves a number by half of it at most, relative to itself


def norm(tree: Params) -> float:
    return math.hypot(*(float(v.double().norm()) for v in tree.values()))


def away(gradients: Params, right: Params) -> float:
    """||a - b|| / ||b|| over all tensors."""
    return norm({k: gradients[k].double() - v for k, v in right.items()}) / norm(right)


def batch_of(shape: tuple[int, ...], n: int) -> Batch:
    source = generator(0, "precision")
    x, y = torch.randn(n, *shape, generator=source), torch.randint(10, (n,), generator=source)
    return Batch(x, y, torch.ones(n), torch.arange(n), torch.tensor(float(n)))


def gradient(model: Model, batch: Batch, precision: Precision, dtype: torch.dtype) -> Params:
    params = {k: v.to(dtype) for k, v in model.init()[0].items()}
    batch = batch._replace(x=batch.x.to(dtype), w=batch.w.to(dtype))
    return gradient_of(model, CrossEntropy(), {}, {}, batch, {}, precision)(params).grad


def smooth() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))


@pytest.mark.parametrize(
    ("net", "most"),
    [
        (lambda: LeNet(1, 28, 10), 0.2),
        (lambda: Mlp((1, 28, 28), (200,), 10), 0.1),
        # Without rectifiers and pools, which rounding flips, a tenth of that.
        (smooth, 2 * UNIT),
    ],
    ids=["lenet", "mlp", "tanh"],
)
def test_how_far_gradients_are_from_float64(net: Callable[[], nn.Module], most: float) -> None:
    model, batch = build(net, 0), batch_of((1, 28, 28), 32)
    right = gradient(model, batch, "float32", torch.float64)
    gradients = gradient(model, batch, "bfloat16", torch.float32)
    assert all(v.dtype == torch.float32 for v in gradients.values())
    assert UNIT / 8 < away(gradients, right) < most
    assert away(gradient(model, batch, "float32", torch.float32), right) < 1e-5


def test_the_products_are_bfloat16s_forward_and_backward() -> None:
    """Logits r(r(x) r(W)^T) and gradient r(r(delta)^T r(x)), r rounding to bfloat16."""
    model, batch = build(lambda: nn.Linear(FEATURES, 10, bias=False), 0), batch_of((FEATURES,), 16)
    weight = model.init()[0]["weight"]

    def r(v: Tensor) -> Tensor:
        return v.bfloat16().float()

    def by_hand(r: Callable[[Tensor], Tensor]) -> Params:
        logits = r(r(batch.x) @ r(weight).T)
        delta = (logits.softmax(1) - nn.functional.one_hot(batch.y, 10)) / 16
        return {"weight": r(r(delta).T @ r(batch.x))}

    gradients = gradient(model, batch, "bfloat16", torch.float32)
    assert away(gradients, by_hand(r)) < UNIT / 100
    assert away(gradients, by_hand(lambda v: v)) > UNIT / 10


class Watching(Term):
    """Cross-entropy that records its inputs, and how the model is called for evaluation."""

    def __init__(self) -> None:
        self.seen: set[object] = set()

    def __call__(self, view: View) -> Tensor:
        at_anchor = view.model(view.params, view.context["anchor_buffers"], view.batch.x)
        self.seen |= {v.dtype for v in (*view.out.values(), *at_anchor.values())}
        self.seen.add(torch.is_autocast_enabled("cpu"))
        return CrossEntropy()(view)


def test_all_else_stays_float32(normed: Model) -> None:
    client, (params, buffers) = make_clients()[1], normed.init()
    ends = {}
    for precision in ("float32", "bfloat16"):
        local = Local(lr=0.1, steps=3, batch=8, momentum=0.5, precision=precision)
        plan, term = plan_all({"t": local}, client, 1, 0, 1)["t"], Watching()
        context = {"anchor_buffers": buffers}
        ends[precision] = end = local(normed, term, params, buffers, context, client, plan)
        assert term.seen == {torch.float32, False}
        for k, v in (params | buffers).items():
            assert (end.params | end.buffers)[k].dtype == v.dtype
        assert end.loss.dtype == torch.float32
    one, two = ends["float32"], ends["bfloat16"]
    for k in one.params | one.buffers:  # the control; counters are counts
        a, b = (one.params | one.buffers)[k], (two.params | two.buffers)[k]
        assert torch.equal(a, b) != a.is_floating_point()


def in_bfloat16(setting: Setting) -> Setting:
    return replace(setting, local=replace(setting.local, precision="bfloat16"))


def ended(setting: Setting, federation: Federation, backend: Backend = loop) -> Params:
    played = last(run(recipes.fedavg(setting), federation, 2, backend=backend))
    params: Params = played.server["params"]
    assert all(v.dtype == torch.float32 for v in params.values())
    return sub(params, federation.params)


@pytest.mark.slow
def test_backends() -> None:
    """Workers bit for bit, also with channels last; stacked clients up to rounding."""
    federation, setting = images(3, torch.float32)
    plain, setting = ended(setting, federation), in_bfloat16(setting)
    one = ended(setting, federation)
    beside = ended(setting, federation, channels_last(loop))
    with workers(federation.clients, 2) as team:
        assert away(ended(setting, federation, team), one) == 0.0
        assert away(ended(setting, federation, channels_last(team)), beside) == 0.0
    stacked = ended(setting, federation, Stacked())
    for other in (one, beside, stacked):
        assert 1e-3 < away(other, plain) < 0.2
    assert away(beside, one) < 0.2
    assert 0.0 < away(stacked, one) < 0.2
    probed = probe({"stacked": Stacked()}, recipes.fedavg(setting), federation)
    assert "away from the loop's" in probed.refused["stacked"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["fedsam", "moon", "scaffold I", "fedrep", "fedala", "fedas"])
def test_methods_train_in_it(name: str) -> None:
    setting = Setting(routed_model(), (0.2,) * CLASSES, Local(lr=0.1, batch=12))
    federation = make_federation(setting.model)
    plain, other = (
        last(run(MAKE[name](s), federation, 2)).server["params"]
        for s in (setting, in_bfloat16(setting))
    )
    moved = {k: v - federation.params[k] for k, v in plain.items()}
    assert 1e-4 < away({k: v - federation.params[k] for k, v in other.items()}, moved) < 0.1
