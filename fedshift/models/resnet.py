"""ResNet-18 and ResNet-50 with batch or group normalisation.

He et al. 2016, "Deep residual learning for image recognition" (arXiv 1512.03385), table 1.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedshift.errors import InputError, check_name

Norm = Literal["batch", "group"]
Stem = Literal["cifar", "imagenet"]

# Blocks of the four stages, and how many times wider a block's output is than its inside.
STAGES = {18: ((2, 2, 2, 2), 1), 50: ((3, 4, 6, 3), 4)}
GROUPS = 32
_WIDTH = 64
# Colour statistics of ImageNet over values in [0, 1], as torchvision's weights expect them.
_MEAN, _SD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Block(nn.Module):
    """relu(shortcut(x) + F(x)), F of two 3x3 convolutions, or 1x1, 3x3, 1x1 for expansion 4.

    In the second kind the 3x3 convolution has the stride, as in torchvision (the paper strides the
    first 1x1). x [n, inputs, h, w] -> [n, width * expansion, h / stride, w / stride].
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        expansion: int,
        stride: int,
        norm: Norm,
        groups: int = GROUPS,
    ) -> None:
        super().__init__()
        outputs = width * expansion
        plain = expansion == 1
        shapes = ((inputs, width, 3, stride), (width, width, 3, 1)) if plain else (
            (inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)
        )  # fmt: skip
        layers: list[nn.Module] = []
        for a, b, kernel, step in shapes:
            layers += [_conv(a, b, kernel, step), _norm(norm, b, groups), nn.ReLU()]
        self.residual = nn.Sequential(*layers[:-1])
        keeps_shape = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if keeps_shape
            else nn.Sequential(_conv(inputs, outputs, 1, stride), _norm(norm, outputs, groups))
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.shortcut(x) + self.residual(x))


class ResNet(nn.Module):
    """Stem, four stages of blocks, average over the image, K logits; inputs [n, channels, h, w].

    depth       18 or 50
    norm        "batch", or "group": 32 groups (Wu & He 2018), which has no running statistics
    stem        "imagenet": 7x7 convolution of stride 2 and 3x3 pooling of stride 2; "cifar": one
                3x3 convolution, for images of about 32 pixels
    projection  width of a linear layer before the classifier, none by default (the FedPALS authors
                replace the last layer by 2048 -> 2048, without activation, and a classifier)
    colours     "scaled": inputs lie in [-1, 1]; "imagenet": such inputs are first normalised by
                ImageNet's means and deviations, as its pretrained weights expect
    Bytes 0..255 are scaled to [-1, 1] first, as `tasks.layout.scaled` does.

    Convolutions start from He's normal initialisation (fan out), normalisation from scale 1 and
    shift 0. `body` ends at the features, 512 (depth 18), 2048 (depth 50) or `projection` many;
    `head` is the classifier.
    """

    def __init__(
        self,
        depth: int,
        classes: int,
        *,
        norm: Norm = "batch",
        stem: Stem = "imagenet",
        channels: int = 3,
        projection: int | None = None,
        colours: Literal["scaled", "imagenet"] = "scaled",
    ) -> None:
        super().__init__()
        if depth not in STAGES:
            raise InputError(f"depth={depth!r}; allowed: {', '.join(map(str, STAGES))}")
        for what, value, kind in (("norm", norm, Norm), ("stem", stem, Stem)):
            check_name(what, value, get_args(kind))
        if colours == "imagenet" and channels != 3:
            raise InputError(f"ImageNet's colours are 3 channels, the images have {channels}")
        self.colours, self.projection = colours, projection
        self.body = backbone(depth, norm, stem, channels)
        features = 8 * _WIDTH * STAGES[depth][1]
        if projection is not None:
            self.body.append(nn.Linear(features, projection))
            features = projection
        self.head = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        # Scaled here, batch by batch: as floats the whole data set would take four times as much.
        if x.dtype == torch.uint8:
            x = x.float().div_(127.5).sub_(1.0)
        if self.colours == "imagenet":
            mean, sd = (x.new_tensor(v).view(3, 1, 1) for v in (_MEAN, _SD))
            x = ((x + 1) / 2 - mean) / sd
        features = self.body(x)
        return {"features": features, "logits": self.head(features)}


def stem_for(size: int) -> Stem:
    """The stem for images of `size` pixels a side: "cifar" up to 64, where the other leaves 2 x 2.

    Our choice: the literature states no border; it uses "cifar" for 32 and "imagenet" for 96.
    """
    return "cifar" if size <= 64 else "imagenet"


def backbone(
    depth: int, norm: Norm, stem: Stem, channels: int, groups: int = GROUPS
) -> nn.Sequential:
    """The layers of `ResNet` up to the average over the image; `groups` is for norm "group"."""
    blocks, expansion = STAGES[depth]
    layers = [*_stem(stem, norm, channels, groups)]
    inputs = _WIDTH
    for stage, count in enumerate(blocks):
        width = _WIDTH << stage
        for k in range(count):
            # The first block of each stage but the first halves the image.
            stride = 2 if stage and not k else 1
            layers.append(Block(inputs, width, expansion, stride, norm, groups))
            inputs = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _stem(stem: Stem, norm: Norm, channels: int, groups: int) -> list[nn.Module]:
    small = stem == "cifar"
    first = _conv(channels, _WIDTH, 3, 1) if small else _conv(channels, _WIDTH, 7, 2)
    pool = [] if small else [nn.MaxPool2d(3, 2, 1)]
    return [first, _norm(norm, _WIDTH, groups), nn.ReLU(), *pool]


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    # No bias: the normalisation after it subtracts any constant.
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def _norm(norm: Norm, channels: int, groups: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(groups, channels)
