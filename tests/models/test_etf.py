"""The fixed simplex as classifier: its angles, what is trained, and its configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedshift import recipes
from fedshift.engine.run import run
from fedshift.errors import InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.config.networks import network
from fedshift.experiments.config.schema import NETWORKS, Network
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.models.etf import EtfHead, simplex, with_etf
from fedshift.models.lenet import LeNet
from fedshift.outputs import dry_logits
from fedshift.recipes import Setting
from support.federations import CLASSES, FEATURES, make_clients, make_federation


@pytest.mark.parametrize(("classes", "width"), [(2, 2), (5, 5), (10, 84)])
def test_angles_are_equal_and_as_large_as_can_be(classes: int, width: int) -> None:
    """V V^T = K/(K-1) I - 1/(K-1) 11^T; one direction less than K, and they sum to 0."""
    v = simplex(classes, width).double()
    eye, ones = torch.eye(classes).double(), torch.ones(classes, classes).double()
    gram = classes / (classes - 1) * eye - ones / (classes - 1)
    assert float((v @ v.T - gram).abs().max()) < 1e-6
    assert float((v.norm(dim=1) - 1).abs().max()) < 1e-6
    assert float(v.sum(0).abs().max()) < 1e-6
    assert int(torch.linalg.matrix_rank(v, tol=1e-5)) == classes - 1
    # Control: random directions have other angles.
    loose = nn.functional.normalize(torch.randn(classes, width, dtype=torch.float64))
    assert float((loose @ loose.T - gram).abs().max()) > 1e-2


@pytest.mark.parametrize(("classes", "width"), [(1, 3), (4, 3)])
def test_no_simplex_fits(classes: int, width: int) -> None:
    with pytest.raises(InputError, match=f"simplex of {classes} directions in {width} dimensions"):
        simplex(classes, width)


def etf_model(seed: int = 0) -> Model:
    return build(lambda: with_etf(Mlp((FEATURES,), (4,), CLASSES)), seed)


def test_logits_are_scaled_cosines() -> None:
    """By trigonometry: the angle between the projected features and each direction."""
    model, x = etf_model(), make_clients()[0].x
    params, buffers = model.init()
    out = model(params, buffers, x)
    h = out["features"] @ params["head.project.weight"].T + params["head.project.bias"]
    for row, features in zip(out["logits"], h, strict=True):
        for z, v in zip(row, params["head.weight"], strict=True):
            cosine = float(features @ v) / float(features.norm() * v.norm())
            assert float(z) == pytest.approx(10 * cosine, abs=1e-4)
    longer = {k: 7 * v if k.startswith("head.project") else v for k, v in params.items()}
    assert float((model(longer, buffers, x)["logits"] - out["logits"]).abs().max()) < 1e-4


def test_no_bias_and_no_number_where_features_are_zero() -> None:
    """`head.bias` is None, as of nn.Linear(bias=False): what says that no bias can be shifted."""
    head = EtfHead(6, 3)
    assert head.bias is None
    assert nn.Linear(6, 3, bias=False).bias is None
    assert "bias" not in dict(head.named_parameters())
    with torch.no_grad():
        head.project.bias.zero_()
    zeros = torch.zeros(2, 6, requires_grad=True)
    logits = head(zeros)
    logits.sum().backward()
    assert not logits.any()
    assert zeros.grad is not None
    assert torch.isfinite(zeros.grad).all()


def test_the_directions_are_neither_trained_nor_sent() -> None:
    model = etf_model()
    algorithm = recipes.fedavg(Setting(model, (0.2,) * CLASSES))
    federation = make_federation(model)
    first = federation.params
    after = list(run(algorithm, federation, 3))[-1].server["params"]
    assert model.fixed == {"head.weight"}
    assert torch.equal(after["head.weight"], first["head.weight"])
    assert not torch.equal(after["head.scale"], first["head.scale"])
    assert not torch.equal(after["head.project.weight"], first["head.project.weight"])


def test_first_directions_depend_on_the_seed_alone() -> None:
    one, again, other = (etf_model(s).init()[0]["head.weight"] for s in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_only_a_linear_head_is_replaced() -> None:
    with pytest.raises(InputError, match="Sequential has no linear layer named head"):
        with_etf(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(InputError, match="temperature must be a positive number, got 0"):
        with_etf(LeNet(1, 28, 10), temperature=0.0)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_takes_it_from_a_file(name: str) -> None:
    config = Network(name=name, classifier="etf", temperature=0.25)
    shape = (32,) if name.startswith(("mlp", "linear")) else (3, 32, 32)
    model = network(config, shape, 5, seed=0)
    params, buffers = model.init()
    assert params["head.weight"].shape[0] == 5
    assert float(params["head.scale"]) == 4.0
    logits = dry_logits(model, params, buffers, torch.randn(2, *shape))
    assert float(logits.abs().max()) <= 4.0 + 1e-5
    plain = network(replace_classifier(config), shape, 5, seed=0).init()[0]
    assert "head.scale" not in plain
    assert all(torch.equal(params[k], v) for k, v in plain.items() if not k.startswith("head."))


def replace_classifier(config: Network) -> Network:
    return config.model_copy(update={"classifier": "linear", "temperature": None})


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        ({"classifier": "eft"}, "fedavg", "classifier"),
        ({"temperature": 0.0, "classifier": "etf"}, "fedavg", "temperature"),
        ({"temperature": math.inf, "classifier": "etf"}, "fedavg", "temperature"),
        ({"temperature": 0.2}, "fedavg", 'temperature is that of .* classifier = "etf"'),
        ({"classifier": "etf", "name": "net.py:Net"}, "fedavg", "let EtfHead .* be the last layer"),
        ({"classifier": "linear"}, "fedgela", "fedgela trains under a fixed classifier"),
        ({"temperature": 0.2, "name": "net.py:Net"}, "fedgela", "temperature is that of"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(
    model: dict[str, Any], method: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        validate({"model": model, "method": {"name": method}})


def test_a_method_that_needs_it_takes_a_temperature_without_the_key() -> None:
    config = validate({"model": {"temperature": 0.2}, "method": {"name": "fedgela"}})
    assert (config.model.classifier, config.model.temperature) == (None, 0.2)


def test_a_network_without_a_fixed_classifier_is_refused(setting: Setting) -> None:
    with pytest.raises(
        InputError, match=r"FedGELA needs a network .* fixed, and all .*\['head\.'\] are trained"
    ):
        recipes.fedgela(setting)
    recipes.fedgela(replace(setting, model=etf_model()))
