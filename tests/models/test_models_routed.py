"""Networks with a class branch and a client branch: sizes, sharing, first weights, outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.models.lenet_gn import SMALL, Widths, lenet_gn
from fedshift.models.resnet import Block
from fedshift.models.resnet_routed import resnet18_routed
from fedshift.models.routed import Routed
from fedshift.seeds import generator
from fedshift.tree import Params

LEVELS = {"none": 0, "shallow": 1, "mid": 2, "deep": 3}


def images(n: int, channels: int, side: int) -> Tensor:
    return torch.rand(n, channels, side, side, generator=generator("routed")) * 2 - 1


def size_of(params: Params, prefix: str) -> int:
    return sum(v.numel() for k, v in params.items() if k.startswith(prefix))


def small(clients: int | None = 8, sharing: str = "deep") -> Model:
    return build(lambda: lenet_gn(1, 28, 10, clients, sharing=sharing, widths=SMALL), seed=3)


@pytest.fixture(scope="module")
def resnet() -> Model:
    return build(lambda: resnet18_routed(10, 8), seed=3)


# ------------------------------------------------------------------------------------------ sizes


def test_the_resnet_has_the_published_sizes(resnet: Model) -> None:
    params, buffers = resnet.init()
    assert not buffers
    assert size_of(params, "body.0.") == 11_168_832
    assert size_of(params, "body.1.") == 131_840
    assert size_of(params, "router.branch.") == 131_840
    assert size_of(params, "router.head.") == 257 * 8
    assert size_of(params, "body.") + size_of(params, "router.") == 11_434_568
    assert {k.split(".")[0] for k in params} == {"body", "head", "router"}
    norms = [m for m in resnet.net.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 1 + 2 * 8 + 3
    assert {m.num_groups for m in norms} == {16}


@pytest.mark.parametrize("classes", [10, 20, 100])
def test_the_head_is_257_numbers_per_class(classes: int) -> None:
    with torch.device("meta"):
        net = resnet18_routed(classes, init="torch")
    params = dict(net.named_parameters())
    assert size_of(params, "head.") == 257 * classes
    assert size_of(params, "body.") == 11_300_672
    assert size_of(params, "router.") == 0


def test_the_small_net_exchanges_55_896_numbers() -> None:
    params, _ = small().init()
    assert size_of(params, "body.") + size_of(params, "router.") == 55_896
    assert size_of(params, "head.") == 85 * 10
    first = build(lambda: lenet_gn(1, 28, 10, 8), seed=3).init()[0]
    assert size_of(first, "body.") + size_of(first, "router.") != 55_896


# Weights and biases of the layers as written down, with two numbers per unit for its norm.
STAGES = (
    32 * (25 * 3 + 1 + 2),
    64 * (25 * 32 + 1 + 2),
    512 * (1600 + 1 + 2) + 256 * (512 + 1 + 2),
    128 * (256 + 1 + 2),
)


@pytest.mark.parametrize("sharing", LEVELS)
def test_what_is_not_shared_is_there_twice(sharing: str) -> None:
    params = dict(lenet_gn(3, 32, 10, 8, sharing=sharing).named_parameters())
    shared = LEVELS[sharing]
    assert [size_of(params, f"body.{k}.") for k in range(4)] == list(STAGES)
    assert size_of(params, "router.branch.") == sum(STAGES[shared:])
    assert size_of(params, "router.head.") == 129 * 8
    assert size_of(params, "head.") == 129 * 10


# ---------------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize("sharing", LEVELS)
def test_the_client_loss_reaches_the_shared_stages_alone(sharing: str) -> None:
    net = lenet_gn(1, 28, 10, 8, sharing=sharing, widths=SMALL)
    out = net(images(4, 1, 28))
    F.cross_entropy(out["client_logits"], torch.arange(4)).backward()
    reached = [any(p.grad is not None for p in stage.parameters()) for stage in net.body]
    assert reached == [k < LEVELS[sharing] for k in range(4)]
    assert all(p.grad is None for p in net.head.parameters())
    assert all(p.grad is not None for p in net.router.parameters())
    net.zero_grad()
    F.cross_entropy(net(images(4, 1, 28))["logits"], torch.arange(4)).backward()
    assert all(p.grad is None for p in net.router.parameters())
    assert all(p.grad is not None for p in (*net.body.parameters(), *net.head.parameters()))


def test_equal_branches_give_equal_features() -> None:
    """A client branch with the class branch's weights computes what that computes."""
    for sharing, shared in LEVELS.items():
        net = lenet_gn(1, 28, 8, 8, sharing=sharing, widths=SMALL)
        x = images(3, 1, 28)
        assert not torch.allclose(net(x)["features"], net(x)["client_features"])
        for mine, other in zip(net.router.branch, net.body[shared:], strict=True):
            mine.load_state_dict(other.state_dict())
        net.router.head.load_state_dict(net.head.state_dict())
        out = net(x)
        assert torch.equal(out["features"], out["client_features"])
        assert torch.equal(out["logits"], out["client_logits"])


def test_the_stages_are_the_layers_of_the_paper() -> None:
    """The class path once more, in torch's functions and with ReLU before pooling as published."""
    net = lenet_gn(3, 32, 10, 8)
    x = z = images(2, 3, 32)
    for stage, groups in zip(net.body[:2], (8, 16), strict=True):
        convolution, norm = stage[0], stage[1]
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        z = F.conv2d(z, convolution.weight, convolution.bias)
        z = F.max_pool2d(F.relu(F.group_norm(z, groups, norm.weight, norm.bias)), 2)
    trunk = z.flatten(1)
    assert trunk.shape == (2, 64 * 5 * 5)
    (_, first, ln1, _, second, ln2, _), (last, ln3, _) = net.body[2], net.body[3]
    for linear, norm in ((first, ln1), (second, ln2)):
        trunk = F.relu(F.layer_norm(linear(trunk), norm.weight.shape, norm.weight, norm.bias))
    out = net(x)
    features = F.relu(ln3(last(trunk)))
    assert torch.allclose(out["features"], features, atol=1e-6)
    assert torch.equal(out["logits"], net.head(out["features"]))
    theirs, norm, _ = net.router.branch[0]
    assert torch.allclose(out["client_features"], F.relu(norm(theirs(trunk))), atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "shape", "width"),
    [
        (lambda m: lenet_gn(3, 32, 10, m), (3, 32), 128),
        (lambda m: lenet_gn(1, 28, 10, m, sharing="none"), (1, 28), 128),
        (lambda m: lenet_gn(1, 28, 10, m, widths=SMALL), (1, 28), 84),
        (lambda m: resnet18_routed(10, m), (3, 8), 256),
        (lambda m: resnet18_routed(10, m, channels=1), (1, 8), 256),
    ],
    ids=["lenet", "lenet grey", "small", "resnet", "resnet grey"],
)
def test_outputs(make: Callable[[int | None], Routed], shape: tuple[int, int], width: int) -> None:
    x = images(2, shape[0], shape[1])
    model = build(lambda: make(5), seed=0)
    out = model(*model.init(), x)
    trunk = out.pop("trunk")  # what the class projection starts from
    assert len(trunk) == 2
    assert {k: tuple(v.shape) for k, v in out.items()} == {
        "features": (2, width),
        "logits": (2, 10),
        "client_features": (2, width),
        "client_logits": (2, 5),
    }
    plain = build(lambda: make(None), seed=0)
    assert set(plain(*plain.init(), x)) == {"features", "logits", "trunk"}
    trained, after = model.train(*model.init(), x)
    assert not after
    assert torch.equal(trained["logits"], out["logits"])


# ---------------------------------------------------------------------------------- first weights


def assert_same_without_router(make: Callable[[int | None], Routed]) -> None:
    plain, routed = (build(lambda m=m: make(m), seed=7).init()[0] for m in (None, 8))
    assert [k for k in routed if not k.startswith("router.")] == list(plain)
    assert all(torch.equal(v, routed[k]) for k, v in plain.items())
    other = build(lambda: make(None), seed=8).init()[0]
    assert not torch.equal(other["head.weight"], plain["head.weight"])


@pytest.mark.parametrize("sharing", LEVELS)
def test_a_router_changes_no_other_first_weight(sharing: str) -> None:
    assert_same_without_router(lambda m: lenet_gn(3, 32, 10, m, sharing=sharing, widths=SMALL))


@pytest.mark.few(1)
@pytest.mark.parametrize("init", ["kaiming", "torch"])
def test_nor_does_it_in_the_resnet(init: str) -> None:
    assert_same_without_router(lambda m: resnet18_routed(10, m, init=init))


def test_sharing_changes_nothing_without_a_router() -> None:
    deep, none = (small(None, sharing).init()[0] for sharing in ("deep", "none"))
    assert deep.keys() == none.keys()
    assert all(torch.equal(v, none[k]) for k, v in deep.items())


def test_kaiming_weights_have_the_variances_of_the_formula(resnet: Model) -> None:
    for module in resnet.net.modules():
        if isinstance(module, nn.Conv2d):
            fan = module.out_channels * math.prod(module.kernel_size)
            assert module.bias is None
        elif isinstance(module, nn.Linear):
            fan = module.in_features
            assert not module.bias.any()
        else:
            continue
        sd, n = math.sqrt(2 / fan), module.weight.numel()
        # Five standard errors of a standard deviation.
        assert abs(float(module.weight.detach().std()) / sd - 1) < 5 / math.sqrt(2 * n)
        assert abs(float(module.weight.detach().mean())) < 5 * sd / math.sqrt(n)


def test_a_residual_block_starts_as_its_shortcut(resnet: Model) -> None:
    blocks = [m for m in resnet.net.modules() if isinstance(m, Block)]
    assert len(blocks) == 8
    x = images(2, 64, 8)
    for block in blocks:
        assert not block.residual[-1].weight.any()
        assert bool((block.residual[1].weight == 1).all())
    assert torch.equal(blocks[0](x), x.relu())
    other = [m for m in resnet18_routed(10, init="torch").modules() if isinstance(m, Block)]
    assert not torch.equal(other[0](x), x.relu())


def test_a_router_can_be_trained() -> None:
    """Steps of gradient descent on the client loss lower it and leave the head alone."""
    net, x, origin = small().net, images(8, 1, 28), torch.arange(8)
    before, losses = net.head.weight.clone(), []
    for _ in range(3):
        loss = F.cross_entropy(net(x)["client_logits"], origin)
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.02 * p.grad
        losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2]
    assert torch.equal(net.head.weight, before)


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: lenet_gn(3, 32, 10, 0), "clients=0; a router tells 1 or more clients apart"),
        (lambda: resnet18_routed(10, -1), "clients=-1; a router tells"),
        (
            lambda: lenet_gn(3, 32, 10, 8, sharing="dep"),  # type: ignore[arg-type]
            'unknown sharing "dep"; allowed: deep, mid, none, shallow. Did you mean "deep"?',
        ),
        (lambda: lenet_gn(3, 15, 10), "at least 16 pixels, got 15"),
        (
            lambda: resnet18_routed(10, init="kaming"),  # type: ignore[arg-type]
            'unknown init "kaming"; allowed: kaiming, torch. Did you mean "kaiming"?',
        ),
        (lambda: Widths(branch=0), "all widths must be 1 or more"),
        (lambda: Widths(dense=()), "with one dense layer at least"),
        (lambda: Widths(groups=(8, 24)), "groups=(8, 24) must divide channels=(32, 64)"),
    ],
)
def test_bad_input(call: Callable[[], object], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        call()
    assert lenet_gn(1, 16, 2, 1, widths=SMALL)(images(1, 1, 16))["client_logits"].shape == (1, 1)
