"""The optional packages that an experiment needs, checked before any data are read."""

from __future__ import annotations

from fedshift.datasets import entry
from fedshift.datasets.augment import kornia_module
from fedshift.experiments.config.schema import Data, Network
from fedshift.models.pretrained import torchvision_models


def check_extras(data: Data, model: Network) -> None:
    """Raises InputError, with how to install it, for a package that cannot be imported."""
    if data.augment == "photos":
        kornia_module()
    if _by_torchvision(model):
        torchvision_models()


def _by_torchvision(model: Network) -> bool:
    """Whether pretrained weights come from torchvision, and not from a file."""
    return model.pretrained and model.weights is None


def extra_packages(data: Data, model: Network) -> tuple[str, ...]:
    """Packages beyond the library's own requirements whose version can change the numbers."""
    # Only if they are used: otherwise lock.json would differ between machines without a reason.
    needed = {"kornia": data.augment == "photos", "torchvision": _by_torchvision(model)}
    others = (name for name, is_needed in needed.items() if is_needed)
    return (*(entry(data.name).needs if data.source is None else ()), *others)
