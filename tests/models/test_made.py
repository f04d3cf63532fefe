"""MADE: autoregressive, normalised, and with masks that belong to the seed alone."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.models.made import Discriminator, Made, degrees, masks
from fedshift.models.projected import projected_lenet, projected_mlp
from fedshift.seeds import generator
from fedshift.tree import Params
from support.federations import CLASSES

SHAPES: list[tuple[int, tuple[int, ...], str]] = [
    (1, (4,), "natural"),
    (5, (), "natural"),
    (6, (20,), "natural"),
    (6, (20,), "random"),
    (8, (15, 12), "random"),
    (10, (9, 30, 11), "natural"),
]
each = pytest.mark.parametrize(("inputs", "hidden", "ordering"), SHAPES)


def density(inputs: int, hidden: tuple[int, ...], ordering: str, seed: int = 3) -> Model:
    return build(lambda: Made((inputs,), hidden, seed=seed, ordering=ordering), seed=1)  # type: ignore[arg-type]


def loud(model: Model, dtype: torch.dtype = torch.float64) -> Params:
    """Parameters far from their start, so that no dependence is small by luck."""
    source = generator(0, "loud")
    return {
        k: torch.randn(v.shape, generator=source, dtype=dtype) for k, v in model.init()[0].items()
    }


def binary(inputs: int) -> Tensor:
    return torch.tensor(list(product((0.0, 1.0), repeat=inputs)), dtype=torch.float64)


@each
def test_probabilities_sum_to_one(inputs: int, hidden: tuple[int, ...], ordering: str) -> None:
    model = density(inputs, hidden, ordering)
    params = loud(model)
    total = model(params, {}, binary(inputs))["log_density"].exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-12)
    net = model.net
    assert isinstance(net, Made)
    if inputs > 1:  # the control: an output that hears itself is no distribution
        last = net.body[-1]
        last.mask = torch.ones_like(last.mask)  # type: ignore[assignment]
        wrong = model(params, {}, binary(inputs))["log_density"].exp().sum()
        assert abs(float(wrong) - 1.0) > 1e-7


@each
def test_the_jacobian_is_strictly_triangular_in_the_order(
    inputs: int, hidden: tuple[int, ...], ordering: str
) -> None:
    model = density(inputs, hidden, ordering)
    params, net = loud(model), model.net
    assert isinstance(net, Made)
    first = torch.from_numpy(net.degrees[0])
    assert sorted(first.tolist()) == list(range(1, inputs + 1))
    x = torch.rand(20, inputs, dtype=torch.float64, generator=generator(0, "points"))
    logits = model(params, {}, x.requires_grad_())["logits"]
    slopes = [torch.autograd.grad(z.sum(), x, retain_graph=True)[0] for z in logits.T]
    dependent = torch.stack([(slope != 0).any(0) for slope in slopes])  # output d, input e
    earlier = first[:, None] > first[None, :]
    assert not (dependent & ~earlier).any()
    if ordering == "random":
        assert (torch.diff(first) < 0).any()
    widths = [w for w in hidden if w < 3 * inputs]
    if not widths:  # wide enough for every path to exist with these seeds
        assert torch.equal(dependent, earlier)


@each
def test_masks_are_the_definition(inputs: int, hidden: tuple[int, ...], ordering: str) -> None:
    layers = degrees(inputs, hidden, ordering, 7)  # type: ignore[arg-type]
    assert [len(m) for m in layers] == [inputs, *hidden]
    for below, above in pairwise(layers):
        assert above.min() >= below.min()
        assert above.max() <= max(inputs - 1, 1)
    *between, last = masks(layers)
    for depth, mask in enumerate(between):
        for k, j in np.ndindex(tuple(mask.shape)):
            assert bool(mask[k, j]) == bool(layers[depth + 1][k] >= layers[depth][j])
    for d, k in np.ndindex(tuple(last.shape)):
        assert bool(last[d, k]) == bool(layers[0][d] > layers[-1][k])


def test_masks_belong_to_the_seed_and_never_travel() -> None:
    one, two = density(9, (30, 20), "random"), density(9, (30, 20), "random")
    other = density(9, (30, 20), "random", seed=4)
    nets = [m.net for m in (one, two, other)]
    same = [
        all(np.array_equal(a, b) for a, b in zip(nets[0].degrees, n.degrees, strict=True))  # type: ignore[union-attr,arg-type]
        for n in nets[1:]
    ]
    assert same == [True, False]
    params, buffers = one.init()
    assert buffers == {}
    assert all(name.endswith((".weight", ".bias")) for name in params)
    state = torch.random.get_rng_state()
    density(9, (30,), "natural")
    assert torch.equal(state, torch.random.get_rng_state())


def test_averages_of_parameters_are_still_distributions() -> None:
    """With shared masks; of networks with masks of their own no average is one."""
    model, x = density(6, (20,), "random"), binary(6)
    a, b = loud(model), {k: v.double() for k, v in model.init()[0].items()}
    mean = {k: (a[k] + b[k]) / 2 for k in a}
    assert float(model(mean, {}, x)["log_density"].exp().sum()) == pytest.approx(1.0, abs=1e-12)
    masked = [
        {k: v * (m.mask if k.endswith("weight") else 1) for k, v in loud(d).items()}
        for d, m in ((d, d.net.body[0]) for d in (density(6, (), "random", s) for s in (1, 2)))  # type: ignore[index,union-attr]
    ]
    w = sum(p["body.0.linear.weight"] for p in masked) / 2
    bias = masked[0]["body.0.linear.bias"]
    z = x @ w.T + bias
    total = (x * z - torch.nn.functional.softplus(z)).sum(1).exp().sum()
    assert abs(float(total) - 1.0) > 1e-3


def test_log_density_is_minus_the_cross_entropy_of_grey_values() -> None:
    model = density(8, (15,), "natural")
    params = loud(model)
    u = torch.rand(5, 8, dtype=torch.float64, generator=generator(1, "grey"))
    out = model(params, {}, u)
    p = out["logits"].sigmoid()
    expected = (u * p.log() + (1 - u) * (1 - p).log()).sum(1)
    assert float((out["log_density"] - expected).abs().max()) < 1e-12


def test_stored_values_are_scaled_clipped_and_rounded() -> None:
    net = Made((2, 2), (), low=-1.0, high=1.0)
    x = torch.tensor([[[-1.0, 0.0], [0.5, 3.0]]])
    assert net.unit(x).tolist() == [[0.0, 0.5, 0.75, 1.0]]
    rounded = Made((2, 2), (), low=-1.0, high=1.0, binary=True)
    assert rounded.unit(x).tolist() == [[0.0, 1.0, 1.0, 1.0]]
    assert rounded.unit(x * float("nan")).isnan().all()
    bytes_ = Made((2,), (), low=0, high=255).unit(torch.tensor([[51, 255]], dtype=torch.uint8))
    assert bytes_.tolist() == [[pytest.approx(0.2), 1.0]]


def test_what_cannot_be_a_made_is_refused() -> None:
    with pytest.raises(InputError, match='unknown ordering of MADE "naturl".*Did you mean "nat'):
        Made((3,), (4,), ordering="naturl")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"3 inputs and hidden widths \[4, 0\]; each must be 1"):
        Made((3,), (4, 0))
    with pytest.raises(InputError, match=r"low = 1.0 and high = 1.0: low must be below high"):
        Made((3,), (4,), low=1.0)


def test_the_discriminator_starts_undecided() -> None:
    model = build(lambda: Discriminator(6, 4), 0)
    out = model(*model.init(), torch.randn(3, 2, 6))
    assert out["logits"].shape == (3, 2)
    assert not out["logits"].any()
    assert out["features"].shape == (3, 2, 4)


# ------------------------------------------------------------------ projection head


def test_a_projection_head_is_its_equation() -> None:
    model = build(lambda: projected_mlp((3, 2), (7,), CLASSES, out=4), 0)
    params, _ = model.init()
    x = torch.randn(5, 3, 2)
    out = model(params, {}, x)
    f = (x.flatten(1) @ params["body.0.1.weight"].T + params["body.0.1.bias"]).relu()
    hidden = (f @ params["body.1.weight"].T + params["body.1.bias"]).relu()
    z = hidden @ params["body.3.weight"].T + params["body.3.bias"]
    assert torch.allclose(out["features"], z, atol=1e-6)
    assert torch.allclose(out["logits"], z @ params["head.weight"].T + params["head.bias"])
    assert params["body.1.weight"].shape == (7, 7)
    assert (out["features"] < 0).any()  # no ReLU at the end: cosines may be negative


def test_a_projected_lenet_has_the_backbone_and_256_features() -> None:
    model = build(lambda: projected_lenet(1, 28, CLASSES), 0)
    out = model(*model.init(), torch.zeros(2, 1, 28, 28))
    assert out["features"].shape == (2, 256)
    assert out["logits"].shape == (2, CLASSES)


def test_projections_to_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="needs features to project"):
        projected_mlp((3,), (), CLASSES)
    with pytest.raises(InputError, match="a projection to 0 features; give 1 or more"):
        projected_mlp((3,), (4,), CLASSES, out=0)
