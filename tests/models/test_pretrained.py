"""ImageNet weights, through torchvision or from a file: the same network, and nothing executed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedshift.errors import DataError, InputError, NetworkError
from fedshift.experiments.config.load import dumps, load_config, validate
from fedshift.experiments.config.networks import network
from fedshift.experiments.config.schema import Network
from fedshift.experiments.task.extras import check_extras, extra_packages
from fedshift.models import pretrained
from fedshift.models.pretrained import from_file, load, torchvision_names
from fedshift.models.resnet import ResNet
from fedshift.seeds import generator
from fedshift_deploy.machines.deployable import configured

# Of torchvision's own networks, classifier included.
TENSORS = {18: 122, 50: 320}
Weights = dict[str, Tensor]


def as_torchvision(depth: int = 18) -> Weights:
    """Random weights under torchvision's names, with its classifier of 1,000 classes."""
    source = generator("weights")
    values = ResNet(depth, 5).body.state_dict().values()
    made = {
        name: torch.rand(v.shape, generator=source) if v.is_floating_point() else torch.tensor(7)
        for name, v in zip(torchvision_names(depth), values, strict=True)
    }
    width = 512 if depth == 18 else 2048
    return made | {"fc.weight": torch.zeros(1000, width), "fc.bias": torch.zeros(1000)}


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", [18, 50])
def test_names_are_those_of_our_tensors_in_order(depth: int) -> None:
    """A block's convolutions come before its downsampling, whose shape can be the same."""
    names, ours = torchvision_names(depth), list(ResNet(depth, 5).body.state_dict())
    assert len(names) + 2 == TENSORS[depth]
    assert len(set(names)) == len(names) == len(ours)
    for theirs, mine in zip(names, ours, strict=True):
        assert ("downsample" in theirs) == ("shortcut" in mine)
        assert theirs.rpartition(".")[2] == mine.rpartition(".")[2]


def with_prefix(weights: Weights) -> dict[str, Any]:
    """As training scripts save it: beside other things, and under a prefix."""
    return {"epoch": 90, "state_dict": {f"module.{name}": v for name, v in weights.items()}}


def without_counters(weights: Weights) -> Weights:
    return {k: v for k, v in weights.items() if "num_batches" not in k}


@pytest.mark.few(1)
@pytest.mark.parametrize("projection", [None, 8])
@pytest.mark.parametrize("form", [dict, with_prefix, without_counters, None])
def test_weights_are_those_of_the_file(form: Any, projection: int | None, tmp_path: Path) -> None:
    weights, path = as_torchvision(), tmp_path / ("w.pth" if form else "w.safetensors")
    torch.save(form(weights), path) if form else save_file(weights, path)
    net = ResNet(18, 5, projection=projection)
    head = net.head.weight.detach().clone()
    assert from_file(net, 18, path) is net
    for name, value in zip(torchvision_names(18), net.body.state_dict().values(), strict=False):
        if "num_batches" not in name:
            assert torch.equal(value, weights[name]), name
    assert torch.equal(net.head.weight, head)


Change = Callable[[dict[str, Any]], Any]


def renamed(weights: dict[str, Any]) -> dict[str, Any]:
    return {("conv.weight" if k == "conv1.weight" else k): v for k, v in weights.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("change", "error", "where"),
    [
        (lambda w: w | {"layer3.6.conv1.weight": torch.zeros(1)}, InputError, "layer3.6.conv1"),
        (renamed, InputError, 'conv1.weight .*Did you mean "conv.weight"'),
        (lambda w: {k: v for k, v in w.items() if "layer4" not in k}, InputError, "layer4.0.conv1"),
        (lambda w: w | {"conv1.weight": torch.zeros(64, 1, 7, 7)}, InputError, "conv1.weight"),
        (lambda w: w | {"bn1.bias": torch.full((64,), torch.nan)}, DataError, "bn1.bias"),
        (
            lambda w: w | {"bn1.bias": torch.full((64,), 1e99, dtype=torch.float64)},
            DataError,
            "bn1.bias",
        ),
        (lambda w: w | {"bn1.bias": torch.ones(64, dtype=torch.int8)}, DataError, "bn1.bias"),
        (lambda w: w | {"bn1.bias": torch.ones(64).to_sparse()}, DataError, "bn1.bias"),
        (lambda w: w | {"bn1.bias": torch.ones(64, device="meta")}, DataError, "bn1.bias"),
        (lambda w: w | {"bn1.running_var": -torch.ones(64)}, DataError, "running_var"),
        (lambda w: w | {"module.bn1.bias": torch.ones(64)}, DataError, "bn1.bias twice"),
        (lambda w: w | {"epoch": 3}, DataError, "epoch"),
        (lambda w: list(w.values()), DataError, "by name"),
        (lambda _: nn.Linear(2, 2), DataError, "never executed"),
    ],
)
def test_other_weights_are_refused_and_nothing_is_copied(
    change: Change, error: type[Exception], where: str, tmp_path: Path
) -> None:
    net = ResNet(18, 5)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.save(change(dict(as_torchvision())), tmp_path / "odd.pth")
    with pytest.raises(error, match=where):
        from_file(net, 18, tmp_path / "odd.pth")
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "other", [{"depth": 50}, {"norm": "group"}, {"stem": "cifar"}, {"channels": 1}]
)
def test_weights_for_another_network_are_refused(other: dict[str, Any]) -> None:
    net = ResNet(**({"depth": 18, "classes": 5} | other))
    with pytest.raises(InputError, match="for another network"):
        load(net, 18, as_torchvision())


class Command:
    """What a pickle would run on being read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("was-here"),)


@pytest.mark.slow
def test_nothing_in_a_checkpoint_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(as_torchvision() | {"command": Command()}, "bad.pth")
    with pytest.raises(DataError, match="never executed"):
        from_file(ResNet(18, 5), 18, Path("bad.pth"))
    assert not Path("was-here").exists()
    torch.load("bad.pth", weights_only=False)
    assert Path("was-here").exists()  # the file would have done it


@pytest.mark.slow
def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone.pth"):
        from_file(ResNet(18, 5), 18, tmp_path / "gone.pth")
    for name, error in (("w.npz", InputError), ("w.safetensors", DataError), ("w.pth", DataError)):
        (tmp_path / name).write_bytes(b"not weights")
        with pytest.raises(error, match=name):
            from_file(ResNet(18, 5), 18, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("both", [True, False])
def test_a_file_takes_torchvisions_place(
    both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pretrained` or not: the network is ImageNet's, and torchvision need not be there."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    weights, path = as_torchvision(), str(tmp_path / "w.safetensors")
    save_file(weights, path)
    config = validate({"model": {"name": "resnet18", "pretrained": both, "weights": path}})
    check_extras(config.data, config.model)
    assert extra_packages(config.data, config.model) == ()
    model = network(config.model, (3, 32, 32), 5, seed=0)
    params, _ = model.init()
    assert torch.equal(params["body.0.weight"], weights["conv1.weight"])
    again = validate({"model": {"name": "resnet18", "pretrained": both, "weights": "w/" + path}})
    assert again.identity == config.identity  # by the file's name, wherever it lies
    assert f'weights = "{path}"' in dumps(config)
    assert Network(name="resnet18").weights is None


def test_weights_that_cannot_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f.toml").write_text('[model]\nname = "resnet18"\nweights = ""\n')
    with pytest.raises(InputError, match=r"f\.toml:3: model\.weights"):
        load_config(tmp_path / "f.toml")
    with pytest.raises(InputError, match="weights is for"):
        validate({"model": {"name": "lenet", "weights": "w.pth"}})
    with pytest.raises(InputError, match="a deployed federation runs no file"):
        configured('[model]\nname = "resnet18"\nweights = "w.pth"\n')
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    with pytest.raises(InputError, match="torchvision, which cannot be imported"):
        network(Network(name="resnet18", pretrained=True), (3, 96, 96), 7, seed=0)


def test_a_failed_download_is_a_network_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Models:
        @staticmethod
        def resnet18(weights: str) -> nn.Module:
            raise OSError(f"no route to {weights}")

    monkeypatch.setattr(pretrained, "torchvision_models", lambda: Models)
    with pytest.raises(NetworkError, match="no route to IMAGENET1K_V1"):
        pretrained.imagenet(ResNet(18, 5), 18)
