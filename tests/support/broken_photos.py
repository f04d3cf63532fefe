"""Wrong input on photographs, their network and local Adam; see `broken_inputs`."""

from __future__ import annotations

from support.broken_inputs import Broken, config

NAME = 'name = "fashion-mnist-mini"'


def training(name: str, keys: str, message: str) -> Broken:
    """GOOD with keys of [training] added."""
    return config(name, "rounds = 1", f"rounds = 1\n{keys}", message)


PHOTO_CASES = (
    config(
        "size of clothes",
        NAME,
        f"{NAME}\nsize = 32",
        'f.toml:4: data: size is for "pacs" and "iwildcam", not for "fashion-mnist-mini"',
    ),
    config("no size", NAME, f"{NAME}\nsize = 0", "f.toml:4: data.size = 0: must be at least 1"),
    config(
        "augmentation unknown",
        NAME,
        f'{NAME}\naugment = "photo"',
        'f.toml:4: data.augment = "photo": allowed are none, photos. Did you mean "photos"?',
    ),
    config(
        "augmentation of grey images",
        NAME,
        f'{NAME}\naugment = "photos"',
        'f.toml:4: data.augment = "photos" is for square colour images, these are (1, 28, 28); use "none"',
    ),
    config(
        "projection without a body for it",
        "[training]",
        "[model]\nprojection = 64\n[training]",
        'f.toml:10: model: projection is for "resnet18", "resnet50", "mlp-moon" and "lenet-moon", '
        'not for "lenet"',
    ),
    training(
        "optimizer unknown",
        'optimizer = "Adam"',
        'f.toml:11: training.optimizer = "Adam": allowed are sgd, adam. Did you mean "adam"?',
    ),
    training(
        "Adam with momentum",
        'optimizer = "adam"\nmomentum = 0.9',
        'f.toml:12: training: momentum is SGD\'s; leave it out with optimizer = "adam"',
    ),
    config(
        "SCAFFOLD's control from Adam",
        '"fedavg"\n[training]',
        '"scaffold"\n[training]\noptimizer = "adam"',
        "f.toml:10: SCAFFOLD option II takes (theta - y) / (lr * steps) for the mean "
        'gradient, wrong with Adam; give training.optimizer = "sgd", or use method.option = "I"',
    ),
    config(
        "FedNova with Adam",
        '"fedavg"\n[training]',
        '"fednova"\n[training]\noptimizer = "adam"',
        "f.toml:10: FedNova divides by how far unit gradients carry a client, which is "
        'known for SGD and not for adam; give training.optimizer = "sgd"',
    ),
)
