"""Flights from New York in 2013: airlines differ in the places that they fly to.

Source: U.S. Bureau of Transportation Statistics, in Wickham's nycflights13.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedshift.datasets.natural.entry import Natural, Rows
from fedshift.datasets.natural.package import Package

PLACES, WEEKS, SMALLEST = 30, 52, 1_000
FEATURES = ["origin", "month", "weekday", "departure", "arrival"]


def read(place: Path) -> Rows:
    """Flights to the 30 places that most go to, of airlines with 1,000 or more of them.

    Features: origin, month, day of the week, departure and arrival by schedule in hours. Distance
    and time in the air are left out, as one number would name the place; so are places to which an
    airline flies less than weekly, which are diversions and not its label set.
    """
    import pandas as pd

    table = pd.read_csv(place / "data" / "flights.csv.zip")
    table = table[table["dest"].isin(table["dest"].value_counts().index[:PLACES])]
    table = table[table.groupby(["carrier", "dest"])["dest"].transform("size") >= WEEKS]
    table = table[table.groupby("carrier")["dest"].transform("size") >= SMALLEST]
    date = pd.to_datetime(table[["year", "month", "day"]])
    inputs = pd.DataFrame({
        "origin": table["origin"],
        "month": table["month"],
        "weekday": date.dt.day_name(),
        "departure": _hours(table["sched_dep_time"]),
        "arrival": _hours(table["sched_arr_time"]),
    })  # fmt: skip
    names = pd.read_csv(place / "data" / "airlines.csv").set_index("carrier")["name"]
    airline = table["carrier"].map(names.str.strip())
    months = date.dt.strftime("%Y-%m")
    return Rows(inputs, table["dest"].tolist(), airline.tolist(), months.tolist())


def _hours(clock: Any) -> Any:
    """Hours of the day; 1845 means a quarter to seven in the evening."""
    return clock // 100 + clock % 100 / 60


FLIGHTS = Natural(
    name="flights",
    summary="destinations of flights from New York, by airline",
    classes=(
        *("ATL", "BNA", "BOS", "BUF", "CLE", "CLT", "CVG", "DCA", "DEN", "DFW", "DTW", "FLL"),
        *("IAD", "IAH", "LAS", "LAX", "MCO", "MDW", "MIA", "MSP", "MSY", "ORD", "PBI", "PHX"),
        *("RDU", "SEA", "SFO", "SJU", "STL", "TPA"),
    ),
    label="dest",
    by="airline",
    rows=258_907,
    clients=11,
    inputs="origin, month, weekday, hours of departure and arrival",
    licence="CC0",
    package=Package("nycflights13", "0.0.3"),
    read=read,
)
