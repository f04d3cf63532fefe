"""ResNets: shapes and sizes as published, frozen BatchNorm, weights from torchvision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedshift.errors import InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.config.networks import network
from fedshift.experiments.config.schema import Network
from fedshift.experiments.task.preparing import scaled
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.models.resnet import Block, ResNet, stem_for
from fedshift.outputs import dry_logits
from fedshift.seeds import generator


def size_of(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def images(n: int = 4, side: int = 16) -> torch.Tensor:
    return torch.rand(n, 3, side, side, generator=generator("resnet")) * 2 - 1


@pytest.fixture(scope="module")
def small() -> ResNet:
    return ResNet(18, 5, stem="cifar")


# ----------------------------------------------------------------------------------- architecture


@pytest.mark.few(1)
@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
def test_sizes_are_those_of_the_published_networks(depth: int, parameters: int) -> None:
    net = ResNet(depth, 1000)
    assert size_of(net) == parameters
    assert size_of(ResNet(depth, 1000, norm="group")) == parameters
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    shortcuts = sum(
        isinstance(m.shortcut, nn.Sequential) for m in net.modules() if type(m) is Block
    )
    assert len(convolutions) - shortcuts + 1 == depth


@pytest.mark.slow
@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize(("stem", "side"), [("imagenet", 64), ("cifar", 16)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_outputs_have_features_and_logits(depth: int, stem: Any, side: int, norm: Any) -> None:
    net = ResNet(depth, 5, norm=norm, stem=stem).eval()
    reduced = {"imagenet": 32, "cifar": 8}[stem]
    with torch.no_grad():
        x = images(2, side)
        out = net(x)
        before = net.body[:-2](x)
    width = {18: 512, 50: 2048}[depth]
    assert before.shape == (2, width, side // reduced, side // reduced)
    assert torch.equal(out["features"], before.mean((2, 3)))
    assert torch.equal(out["logits"], net.head(out["features"]))


@pytest.mark.slow
def test_a_projection_and_other_channels() -> None:
    net = ResNet(18, 5, stem="cifar", channels=1, projection=32).eval()
    out = net(torch.zeros(2, 1, 16, 16))
    assert out["features"].shape == (2, 32)
    assert size_of(ResNet(50, 7, projection=2048)) == size_of(ResNet(50, 7)) + 2048 * 2049


def test_a_block_is_the_formula(small: ResNet) -> None:
    for block in (Block(8, 8, 1, 1, "batch"), Block(8, 4, 4, 2, "batch")):
        block.eval()
        x = torch.randn(2, 8, 6, 6, generator=generator("block"))
        assert torch.equal(block(x), torch.relu(block.shortcut(x) + block.residual(x)))
        assert (block.shortcut(x) is x) == (block.residual(x).shape == x.shape)


def test_imagenet_colours_are_normalised() -> None:
    net = ResNet(18, 5, stem="cifar", colours="imagenet").eval()
    x = images()
    mean, sd = (
        torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    wanted = net.head(net.body(((x + 1) / 2 - mean) / sd))
    assert torch.allclose(net(x)["logits"], wanted, atol=1e-6)
    assert not torch.allclose(net.head(net.body(x)), wanted, atol=1e-2)


def test_the_stem_follows_the_size() -> None:
    assert [stem_for(s) for s in (28, 32, 64, 65, 96, 224)] == ["cifar"] * 3 + ["imagenet"] * 3


@pytest.mark.parametrize(
    "options",
    [{"depth": 34}, {"norm": "groups"}, {"stem": "cifr"}, {"colours": "imagenet", "channels": 1}],
)
def test_other_networks_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options)).rstrip("s")):
        ResNet(**({"depth": 18, "classes": 5} | options))


@pytest.mark.slow
def test_a_group_normed_network_has_no_buffers_and_learns() -> None:
    model = build(lambda: ResNet(18, 5, norm="group", stem="cifar"), seed=0)
    params, buffers = model.init()
    assert not buffers
    assert all(torch.equal(v, w) for v, w in zip(
        params.values(),
        build(lambda: ResNet(18, 5, norm="group", stem="cifar"), seed=0).init()[0].values(),
        strict=True,
    ))  # fmt: skip
    leaves = {k: v.requires_grad_() for k, v in params.items()}
    x, y = images(8), torch.arange(8) % 5
    loss = nn.functional.cross_entropy(model.train(leaves, buffers, x)[0]["logits"], y)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    after = {k: v.detach() - 0.01 * g for (k, v), g in zip(leaves.items(), grads, strict=True)}
    with torch.no_grad():
        again = nn.functional.cross_entropy(model(after, buffers, x)["logits"], y)
    assert again < loss


# --------------------------------------------------------------------------------- frozen BatchNorm


def test_frozen_norm_keeps_and_uses_the_given_statistics(small: ResNet) -> None:
    frozen, free = Model(small, freeze_norm=True), Model(small)
    params, buffers = frozen.init()
    moved = {k: v + 0.5 if v.is_floating_point() else v for k, v in buffers.items()}
    x = images()
    for _ in range(2):
        small.train()  # As a module starts, and as another user of it may leave it.
        out, after = frozen.train(params, moved, x)
        assert all(torch.equal(after[k], moved[k]) for k in moved)
        assert torch.equal(out["logits"], frozen(params, moved, x)["logits"])
    small.train()
    loose, changed = free.train(params, moved, x)
    assert not torch.allclose(loose["logits"], out["logits"])
    floats = [k for k in moved if moved[k].is_floating_point()]
    assert all(not torch.equal(changed[k], moved[k]) for k in floats)


def test_frozen_norm_still_trains_scale_and_shift(small: ResNet) -> None:
    model = Model(small, freeze_norm=True)
    params, buffers = model.init()
    leaves = {k: v.requires_grad_() for k, v in params.items()}
    out, _ = model.train(leaves, buffers, images())
    scale = next(k for k, m in small.named_modules() if isinstance(m, nn.BatchNorm2d)) + ".weight"
    (grad,) = torch.autograd.grad(out["logits"].square().sum(), [leaves[scale]])
    assert grad.abs().sum() > 0


def test_frozen_norm_leaves_dropout_in_training() -> None:
    net = nn.Sequential(nn.Linear(4, 40), nn.BatchNorm1d(40), nn.Dropout(0.5))
    model = Model(net, freeze_norm=True)
    out, _ = model.train(*model.init(), torch.randn(3, 4, generator=generator("dropout")))
    assert (out["logits"] == 0).any()


def test_nothing_to_freeze_is_refused() -> None:
    with pytest.raises(InputError, match="no BatchNorm to freeze; leave it out"):
        build(lambda: Mlp((4,), (3,), 2), seed=0, freeze_norm=True)
    assert build(lambda: nn.BatchNorm1d(3), seed=0, freeze_norm=True).freeze_norm


# ------------------------------------------------------------------------------------ configuration


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["resnet18-gn", "resnet18", "resnet50"])
def test_networks_are_configured_by_name(name: Any) -> None:
    model = network(Network(name=name, freeze_norm=name != "resnet18-gn"), (3, 16, 16), 5, seed=0)
    assert model.freeze_norm == (name != "resnet18-gn")
    net = model.net
    assert isinstance(net, ResNet)
    assert net.head.in_features == (2048 if name == "resnet50" else 512)
    assert net.body[0].kernel_size == (3, 3)
    assert any(isinstance(m, nn.GroupNorm) for m in net.modules()) == (name == "resnet18-gn")
    with pytest.raises(InputError, match=rf'"{name}" needs square images .*use "mlp" or "linear"'):
        network(Network(name=name), (784,), 5, seed=0)


def test_a_projection_is_configured_and_bytes_are_scaled_by_the_network() -> None:
    model = network(Network(name="resnet18", projection=24), (3, 16, 16), 5, seed=0)
    params, buffers = model.init()
    assert params["head.weight"].shape == (5, 24)
    source = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=source)
    seen = model(params, buffers, x)["logits"]
    assert torch.equal(seen, model(params, buffers, scaled(x))["logits"])
    assert not torch.equal(seen, model(params, buffers, x.float())["logits"])
    lenet = network(Network(), (3, 16, 16), 5, seed=0)
    with pytest.raises(InputError, match="the model fails on inputs torch.uint8"):
        dry_logits(lenet, *lenet.init(), x)


@pytest.mark.parametrize("key", ["pretrained", "freeze_norm"])
def test_options_of_batch_norm_are_refused_elsewhere(key: str) -> None:
    with pytest.raises(
        InputError, match=f'{key} is for "resnet18" and "resnet50", not for "lenet"'
    ):
        validate({"model": {"name": "lenet", key: True}})
