"""ImageNet weights from files: the same network as through torchvision, and nothing executed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import dumps, load_config, validate
from fedshift.experiments.config.networks import network
from fedshift.experiments.config.schema import Network
from fedshift.experiments.task.extras import check_extras, extra_packages
from fedshift.models import pretrained
from fedshift.models.resnet import ResNet
from fedshift.models.weight_file import from_file, torchvision_names
from fedshift.seeds import generator
from fedshift_deploy.machines.deployable import configured

# Of torchvision's own networks, classifier included.
TENSORS = {18: 122, 50: 320}


def as_torchvision(depth: int = 18) -> dict[str, Tensor]:
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


def in_safetensors(weights: dict[str, Tensor], folder: Path) -> Path:
    save_file(weights, folder / "resnet.safetensors")
    return folder / "resnet.safetensors"


def in_torch(weights: dict[str, Tensor], folder: Path) -> Path:
    torch.save(weights, folder / "resnet.pth")
    return folder / "resnet.pth"


def of_devices(weights: dict[str, Tensor], folder: Path) -> Path:
    """As training scripts save it: beside other things, and under a prefix."""
    inner = {f"module.{name}": v for name, v in weights.items()}
    torch.save({"epoch": 90, "state_dict": inner}, folder / "resnet.pt")
    return folder / "resnet.pt"


def before_counters(weights: dict[str, Tensor], folder: Path) -> Path:
    torch.save({k: v for k, v in weights.items() if "num_batches" not in k}, folder / "old.pth")
    return folder / "old.pth"


@pytest.mark.few(1)
@pytest.mark.parametrize("write", [in_safetensors, in_torch, of_devices, before_counters])
def test_weights_are_those_of_the_file(
    write: Callable[[dict[str, Tensor], Path], Path], tmp_path: Path
) -> None:
    weights = as_torchvision()
    mine = from_file(ResNet(18, 5, projection=8), 18, write(weights, tmp_path))
    theirs, ours = pretrained.load(ResNet(18, 5), weights).body.state_dict(), mine.body.state_dict()
    for name, value in theirs.items():
        if "num_batches_tracked" not in name:
            assert torch.equal(ours[name], value), name
    assert not torch.equal(ours["0.weight"], ResNet(18, 5).body.state_dict()["0.weight"])


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    weights: dict[str, Any] = dict(as_torchvision())
    torch.save(change(weights), folder / "odd.pth")
    return folder / "odd.pth"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"layer3.6.conv1.weight": torch.zeros(1)},
         r"not the weights of torchvision's resnet18: it has layer3\.6\.conv1\.weight, which"),
        (lambda w: {("conv.weight" if k == "conv1.weight" else k): v for k, v in w.items()},
         r'conv1\.weight is missing \(1 of 100 are\)\. Did you mean "conv\.weight"'),
        (lambda w: {k: v for k, v in w.items() if "layer4" not in k},
         r"layer4\.0\.conv1\.weight is missing \(25 of 100 are\)\.$"),
        (lambda w: w | {"conv1.weight": torch.zeros(64, 1, 7, 7)}, "these weights are for another"),
    ],
)  # fmt: skip
def test_weights_of_other_networks_are_refused(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    net = ResNet(18, 5)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(InputError, match=message):
        from_file(net, 18, changed(tmp_path, change))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"bn1.bias": torch.full((64,), torch.nan)}, "bn1.bias holds numbers that"),
        (lambda w: w | {"epoch": 3}, "'epoch' is a int and no tensor; save a state_dict"),
        (lambda w: list(w.values()), "holds no tensors by name"),
        (lambda w: w | {"bn1.bias": torch.ones(64, dtype=torch.int8)}, "of kind strided int8; all"),
        (lambda w: w | {"bn1.bias": torch.ones(64, dtype=torch.complex64)}, "strided complex64"),
        (lambda w: w | {"bn1.bias": torch.ones(64).to_sparse()}, "of kind sparse_coo float32; all"),
        (
            lambda w: w | {"bn1.bias": torch.ones(64, device="meta")},
            "bn1.bias is of kind meta; all",
        ),
        (lambda w: w | {"bn1.bias": torch.full((64,), 1e99, dtype=torch.float64)}, "not finite in"),
        (lambda w: w | {"bn1.running_var": -torch.ones(64)}, "running_var holds variances below 0"),
        (lambda w: w | {"module.bn1.bias": torch.ones(64)}, "has bn1.bias twice, with and without"),
        (lambda _: torch.nn.Linear(2, 2), r"holds more than tensors, which is never executed; sav"),
    ],
)
def test_damaged_weights_are_refused(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        from_file(ResNet(18, 5), 18, changed(tmp_path, change))


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
    with pytest.raises(DataError, match=r"bad\.pth: .* which is never executed; save"):
        from_file(ResNet(18, 5), 18, Path("bad.pth"))
    assert not Path("was-here").exists()
    torch.load("bad.pth", weights_only=False)
    assert Path("was-here").exists()  # the file would have done it


@pytest.mark.slow
def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match='there is no file ".*gone.pth"; name one that is there'):
        from_file(ResNet(18, 5), 18, tmp_path / "gone.pth")
    for name, error, message in (
        ("w.npz", InputError, r"ends in .npz; allowed: .safetensors, .pth, .pt, .bin"),
        ("w.safetensors", DataError, "cannot be read as weights"),
        ("w.pth", DataError, "is damaged, or holds more than tensors"),
    ):
        (tmp_path / name).write_bytes(b"not weights")
        with pytest.raises(error, match=message):
            from_file(ResNet(18, 5), 18, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("both", [True, False])
def test_a_file_takes_torchvisions_place(
    both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pretrained` or not: the network is ImageNet's, and torchvision need not be there."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    weights = as_torchvision()
    path = str(in_safetensors(weights, tmp_path))
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


def test_no_name_is_refused_and_not_taken_for_the_folder(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text('[model]\nname = "resnet18"\nweights = ""\n')
    with pytest.raises(InputError, match=r"f\.toml:3: model\.weights = \"\""):
        load_config(tmp_path / "f.toml")


def test_weights_are_for_networks_of_torchvision_and_for_this_machine() -> None:
    with pytest.raises(InputError, match='weights is for "resnet18" and "resnet50", not for "le'):
        validate({"model": {"name": "lenet", "weights": "w.pth"}})
    with pytest.raises(InputError, match="a deployed federation runs no file that an experiment"):
        configured('[model]\nname = "resnet18"\nweights = "w.pth"\n')
