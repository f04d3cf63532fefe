"""The catalogue of the data sets that only the papers' experiments use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedshift.datasets import entry
from fedshift.datasets.entry import Entry, OwnClients, Wanted, remotes_at
from fedshift_papers.datasets import (
    fedpals_clients,
    gaussians,
    heart,
    iwildcam,
    pacs,
    retina,
    worlds,
)

_PACS = Entry(
    name="pacs",
    summary="seven kinds of things as photo, art painting, cartoon and sketch",
    classes=pacs.CLASSES,
    examples=(5_683, 1_670),
    shape=f"3 x {pacs.SIZE} x {pacs.SIZE}",
    licence="none stated; the authors ask to cite Li et al. (2017)",
    page="https://dali-dl.github.io/project_iccv2017.html",
    by_hand=(
        "follow the download link of https://dali-dl.github.io/project_iccv2017.html and put the "
        "tree DOMAIN/CLASS/name.jpg into pacs/, or an uncompressed tar of it, pacs.tar"
    ),
    self_checked=True,
    folders=("pacs_v1.0", "pacs", "PACS", "pacs96", "pacs.tar", "pacs96.tar"),
    missing=pacs.missing,
    read=pacs.read,
    sized=True,
    needs=("pillow",),
    clients=fedpals_clients.pacs_clients,
)

_IWILDCAM = Entry(
    name="iwildcam",
    summary="animals seen by 323 camera traps, WILDS v2.0",
    classes=tuple(str(y) for y in range(iwildcam.CLASSES)),
    examples=(129_809, 42_791),
    shape=f"3 x {iwildcam.SIZE} x {iwildcam.SIZE}",
    licence="CDLA-Permissive 1.0 (Beery et al.)",
    page="https://wilds.stanford.edu/datasets/#iwildcam",
    by_hand=(
        "12 GB; download it with the `wilds` package (its get_dataset with dataset="
        '"iwildcam" and download=True) and put its iwildcam_v2.0/ into a search folder'
    ),
    self_checked=True,
    folders=("iwildcam_v2.0",),
    missing=iwildcam.missing,
    read=iwildcam.read,
    sized=True,
    needs=("pillow",),
    clients=fedpals_clients.iwildcam_clients,
)

_RETINA = Entry(
    name="retina",
    summary="glaucoma on pictures of the optic disc, ACRIMA, RIM-ONE and REFUGE",
    classes=retina.CLASSES,
    examples=(1_672, 718),
    shape=f"3 x {retina.SIZE} x {retina.SIZE}",
    licence="each set has its own; RIM-ONE DL forbids redistribution and commercial use",
    page="https://arxiv.org/abs/2509.23049",
    by_hand=(
        "download ACRIMA (https://doi.org/10.6084/m9.figshare.7613135), RIM-ONE DL "
        "(https://github.com/miag-ull/rim-one-dl) and REFUGE (https://refuge.grand-challenge.org, "
        "after registration) and unpack all three into retina/"
    ),
    self_checked=True,
    folders=("retina_balanced", "retina", "RETINA", "retina.tar"),
    missing=retina.missing,
    read=retina.read,
    sites=retina.SITES,
    at_sites=retina.at_sites,
)

_HEART_DISEASE = Entry(
    name="heart-disease",
    summary="patients of four hospitals, 13 features",
    classes=heart.CLASSES,
    examples=(643, 277),
    shape="13",
    licence="CC BY 4.0 (Janosi, Steinbrunn, Pfisterer & Detrano)",
    page="https://doi.org/10.24432/C52P4X",
    self_checked=True,
    folders=("heart-disease", "heart+disease", "heart_disease_dataset"),
    missing=heart.missing,
    read=heart.read,
    sites=heart.SITES,
    at_sites=heart.at_sites,
    remotes=remotes_at(
        "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/",
        # UCI prints no checksums; these are the ones that FLamby's download checks.
        ("processed.cleveland.data", "2d91a8ff69cfd9616aa47b59d6f843db", 18_461),
        ("processed.hungarian.data", "22e96bee155b5973568101c93b3705f6", 10_263),
        ("processed.switzerland.data", "9a87f7577310b3917730d06ba9349e20", 4_109),
        ("processed.va.data", "4249d03ca7711e84f4444768c9426170", 6_737),
    ),
)

_GAUSSIANS = Entry(
    name="gaussians",
    summary="the FedPALS paper's synthetic task: 3 Gaussians, 2 clients",
    classes=("0", "1", "2"),
    examples=(58, 2_000),
    shape="2",
    licence="generated, none needed",
    page="https://arxiv.org/abs/2411.03799",
    built_in="generated",
    generate=gaussians.examples,
    clients=gaussians.clients,
    moves=True,
)


def _world(name: str, summary: str, make: Callable[[Wanted], OwnClients], **more: Any) -> Entry:
    return Entry(
        name, summary, page="docs/methods/feddisk.md", built_in="generated", clients=make,
        generate=worlds.examples(make), **more,
    )  # fmt: skip


_TWO = {
    "classes": worlds.CLASSES,
    "examples": (12_000, 6_000),
    "licence": "generated, none needed",
}
_CLOTHES = entry("fashion-mnist-mini")
_WORLDS = (
    _world(
        "binary-world",
        "eight tilted bits, 3 clients whose densities are known",
        worlds.binary_world,
        shape="8",
        **_TWO,
    ),
    _world(
        "gaussian-world",
        "four Gaussian numbers, 3 clients whose densities are known",
        worlds.gaussian_world,
        shape="4",
        **_TWO,
    ),
    _world(
        "looks-world",
        "small Fashion-MNIST in three looks, 3 clients whose shares are known",
        worlds.looks_world,
        shape="1 x 14 x 14",
        classes=_CLOTHES.classes,
        examples=_CLOTHES.examples,
        licence=_CLOTHES.licence,
    ),
)

ENTRIES = (_PACS, _IWILDCAM, _RETINA, _HEART_DISEASE, _GAUSSIANS, *_WORLDS)
