"""Bird strikes at airports of 29 states, from the reports to the FAA of 1990 to 2002."""

from __future__ import annotations

import io
from pathlib import Path

from fedshift.datasets.natural.entry import Natural, Rows
from fedshift.datasets.natural.package import Package, read_files

FILE = "data/birdstrikes.csv"
FEATURES = {
    "Aircraft Make Model": "aircraft",
    "Aircraft Airline Operator": "operator",
    "Phase of flight": "phase",
    "Time of day": "time_of_day",
    "Effect Amount of damage": "damage",
    "Speed IAS in knots": "speed",
}


def read(place: Path) -> Rows:
    """10,000 strikes: aircraft, operator, phase of flight, time of day, damage, speed in knots.

    Left out are the airport, a part of the client; the species, whose name has the size in it; and
    the costs, nearly all 0.
    """
    import pandas as pd

    text = read_files(place, lambda name: name == FILE)[FILE]
    # Damage has the value "None", which is no missing value.
    table = pd.read_csv(io.BytesIO(text), keep_default_na=False, na_values=[""])
    return Rows(
        table[list(FEATURES)].rename(columns=FEATURES),
        table["Wildlife Size"].tolist(),
        table["Origin State"].tolist(),
        table["Flight Date"].str[:7].tolist(),
    )


BIRD_STRIKES = Natural(
    name="bird-strikes",
    summary="sizes of the birds that aircraft met, by state",
    classes=("Small", "Medium", "Large"),
    label="Wildlife Size",
    by="Origin State",
    rows=10_000,
    clients=29,
    inputs="5 categories and the speed",
    licence="BSD-3-Clause (vega-datasets), U.S. Government data",
    package=Package("vega-datasets", "3.2.1", npm=True),
    read=read,
)
