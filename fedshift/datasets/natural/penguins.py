"""Penguins of three islands: one species lives on one island alone.

Source: Gorman, Williams and Fraser (2014), PLoS ONE 9(3): e90081; Horst, Hill and Gorman (2020).
"""

from __future__ import annotations

from pathlib import Path

from fedshift.datasets.natural.entry import Natural, Rows
from fedshift.datasets.natural.package import Package

FEATURES = ["bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g", "sex"]


def read(place: Path) -> Rows:
    """344 penguins: four measures and the sex, some of them missing."""
    import pandas as pd

    table = pd.read_csv(place / "data" / "penguins.csv")
    years = table["year"].astype(str).tolist()
    return Rows(table[FEATURES], table["species"].tolist(), table["island"].tolist(), years)


PENGUINS = Natural(
    name="penguins",
    summary="penguins of three islands",
    classes=("Adelie", "Chinstrap", "Gentoo"),
    label="species",
    by="island",
    rows=344,
    clients=3,
    inputs="4 measures and the sex",
    licence="CC0 (data), MIT (package)",
    package=Package("palmerpenguins", "0.1.6"),
    read=read,
)
