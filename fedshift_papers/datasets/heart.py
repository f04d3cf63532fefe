"""UCI Heart Disease: the patients of four hospitals, one file each, as a federation of four.

Janosi, Steinbrunn, Pfisterer & Detrano 1988, UCI Machine Learning Repository,
doi:10.24432/C52P4X. A real federation: the hospitals differ in the
share of the ill, in the patients, and in what is measured at all.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.datasets.base import Samples, damaged
from fedshift.datasets.images import Ints
from fedshift.datasets.sites import TEST_SHARE, Sites, SiteSplit, pooled, split_sites
from fedshift.datasets.store import Folder

Floats = NDArray[np.float64]

SITES = ("cleveland", "hungarian", "switzerland", "va")
CLASSES = ("healthy", "heart disease")
FILES = tuple(f"processed.{site}.data" for site in SITES)


@dataclass(frozen=True)
class Column:
    """The values that a column allows: one of `codes`, or a number from `low` to `high` in `unit`.

    With `zero_missing`, 0 stands for a value that was not measured: no patient has a blood pressure
    or a cholesterol of 0, and one hospital wrote 0 for the cholesterol of every patient.
    """

    name: str
    codes: tuple[int, ...] = ()
    low: float = 0.0
    high: float = 0.0
    unit: str = ""
    zero_missing: bool = False

    def allows(self, value: float) -> bool:
        """Whether the value can occur."""
        return value in self.codes if self.codes else self.low <= value <= self.high

    @property
    def allowed(self) -> str:
        """What can occur, for messages."""
        if self.codes:
            return ", ".join(map(str, self.codes))
        return f"{self.low:g} to {self.high:g}{self.unit and ' '}{self.unit}"


# Codes as heart-disease.names lists them; bounds are wide, they only catch damage.
FEATURES = (
    Column("age", low=0, high=120, unit="years"),
    Column("sex", (0, 1)),
    Column("cp", (1, 2, 3, 4)),
    Column("trestbps", low=0, high=300, unit="mm Hg", zero_missing=True),
    Column("chol", low=0, high=1000, unit="mg/dl", zero_missing=True),
    Column("fbs", (0, 1)),
    Column("restecg", (0, 1, 2)),
    Column("thalach", low=30, high=250, unit="beats/min"),
    Column("exang", (0, 1)),
    Column("oldpeak", low=-8, high=12),
    Column("slope", (1, 2, 3)),
    Column("ca", (0, 1, 2, 3)),
    Column("thal", (3, 6, 7)),
)
LABEL = Column("num", (0, 1, 2, 3, 4))

# Of each hospital: rows, rows with num > 0, and missing values (with zeros that mean "missing").
OFFICIAL = ((303, 139, 6), (294, 106, 782), (123, 115, 396), (200, 149, 748))

# The files write ? for a missing value; their description says that it is -9.
_MISSING = ("?", "-9", "-9.0")
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)")


@dataclass(frozen=True, eq=False)
class Patients:
    """What the hospitals recorded, as coded in the files; NaN where a value is missing.

    Shapes: values float64 [n, 13] in the order of FEATURES; y int64 [n], 1 where num > 0; site
    int64 [n], in SITES.
    """

    place: Path
    values: Floats
    y: Ints
    site: Ints


def scan(path: Path | str) -> Patients:
    """Read the four files processed.{cleveland,hungarian,switzerland,va}.data of a folder.

    One patient a line, 14 comma-separated numbers: the 13 features and num, the diagnosis 0 to 4.
    The label is num > 0, as in all published work. Missing: `?` (or -9), and a blood pressure or
    cholesterol of 0.

    Raises DataError for a file that is missing, no text or empty; a line with another number of
    values; a value that is no number or cannot occur. File, line and column are named.
    """
    store = Folder(Path(path))
    tables = [_table(store.place / name, store.read(name)) for name in FILES]
    table = np.concatenate(tables)
    sizes = [len(t) for t in tables]
    return Patients(
        store.place,
        table[:, :-1],
        (table[:, -1] > 0).astype(np.int64),
        np.repeat(np.arange(len(SITES)), sizes),
    )


def sums(values: Floats) -> Floats:
    """All that a hospital sends about its training patients `values` [n, 13]: float64 [3, 13].

    Per feature, over the values present: how many there are, their sum, the sum of their squares.
    """
    present = ~np.isnan(values)
    filled = np.where(present, values, 0.0)
    return np.stack([present.sum(0).astype(np.float64), filled.sum(0), (filled**2).sum(0)])


def standardise(values: Floats, everyone: Floats) -> Tensor:
    """x_f = (v_f - m_f) / s_f, and x_f = 0, the mean, where v_f is missing.

    m_f = total_f / count_f, s_f^2 = squares_f / count_f - m_f^2, of `everyone`, the hospitals'
    `sums` added up. A feature that never varies, or is never present, has s_f = 1 (and m_f = 0).
    The hospital that a patient belongs to plays no part, so a server can do the same for a query
    that it has yet to route.

    The codes of cp, restecg, slope and thal are used as the numbers that they are (chosen: the
    13 features of the files; FLamby makes 0/1 columns of two and drops slope, ca and thal).

    Shapes: values float64 [n, 13], result float32 [n, 13].
    """
    count, total, squares = everyone
    count = np.maximum(count, 1.0)
    mean = total / count
    # The difference of two sums is only good to 1e-16 of them: less than 1e-10 is no variation.
    variance = squares / count - mean**2
    varies = variance > 1e-10 * (squares / count)
    scale = np.sqrt(np.where(varies, variance, 1.0))
    return torch.from_numpy(np.nan_to_num((values - mean) / scale, nan=0.0)).float()


def federated(
    patients: Patients, seed: int = 0, test: float = TEST_SHARE
) -> tuple[Sites, SiteSplit]:
    """The four hospitals as clients: all examples, with each client's training and test rows.

    Rows are divided by `split_sites`. The scale is that of the training rows of all hospitals: each
    gives its `sums`, and the server adds them up. Test rows have no part in it.

    Raises InputError for a hospital with too few patients to divide.
    """
    split = split_sites(patients.site, len(SITES), seed, test)
    first, *others = (sums(patients.values[rows]) for rows in split.train)
    x = standardise(patients.values, sum(others, first))
    y, site = torch.from_numpy(patients.y), torch.from_numpy(patients.site)
    return Sites(x, y, site, SITES, CLASSES), split


def at_sites(folder: Path, seed: int, test: float) -> tuple[Sites, SiteSplit]:
    """The hospitals of a folder with their split; the catalogue's form of `federated`."""
    return federated(scan(folder), seed, test)


def read(path: Path) -> tuple[Samples, Samples]:
    """(train, test) of all hospitals together, 643 and 277 patients, divided with seed 0.

    Raises DataError where rows, labels or missing values are not as many as in the official files.
    """
    patients = scan(path)
    check_complete(patients)
    return pooled(*federated(patients))


def check_complete(patients: Patients) -> None:
    """Raises DataError unless every hospital's counts are the official ones."""
    for i, (name, official) in enumerate(zip(FILES, OFFICIAL, strict=True)):
        rows = patients.site == i
        missing = int(np.isnan(patients.values[rows]).sum())
        counts = (int(rows.sum()), int(patients.y[rows].sum()), missing)
        if counts != official:
            text, right = ("{} rows, {} with num > 0, {} values missing".format(*c)
                           for c in (counts, official))  # fmt: skip
            raise damaged(patients.place / name, f"{text}; officially {right}")


def missing(path: Path) -> tuple[str, ...]:
    """Which of the four files are not there."""
    return tuple(name for name in FILES if not os.path.isfile(path / name))


def _table(where: Path, raw: bytes) -> Floats:
    """The file's 14 columns, NaN where missing: float64 [n, 14]."""
    try:
        lines = raw.decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise damaged(where, f"not a text file ({error})") from error
    rows = [_row(where, k, line) for k, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise damaged(where, "has no rows")
    return np.array(rows)


def _row(where: Path, k: int, line: str) -> list[float]:
    columns = (*FEATURES, LABEL)
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(columns):
        names = ", ".join(column.name for column in columns)
        raise damaged(where, f"line {k} has {len(cells)} values, expected {len(columns)}: {names}")
    return [_value(where, k, column, cell) for column, cell in zip(columns, cells, strict=True)]


def _value(where: Path, k: int, column: Column, cell: str) -> float:
    if cell in _MISSING and column is not LABEL:
        return float("nan")
    # A pattern, because float() also takes "nan", "inf" and "1_0".
    if not _NUMBER.fullmatch(cell) or not column.allows(float(cell)):
        otherwise = "" if column is LABEL else ", or ? where it is missing"
        raise damaged(
            where, f'line {k}: {column.name} is "{cell}"; allowed: {column.allowed}{otherwise}'
        )
    value = float(cell)
    return float("nan") if column.zero_missing and value == 0.0 else value
