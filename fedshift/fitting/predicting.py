"""Predictions for raw rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import InputError

MOST = 5


@dataclass(frozen=True, eq=False)
class Prediction:
    """The name of the most probable class of each row [n], and probabilities [n, K].

    sets: True if names are sets of labels; probabilities [n, L] are then those of each label.
    """

    names: NDArray[np.str_]
    probabilities: NDArray[np.float64]
    classes: tuple[str, ...]
    sets: bool = False

    def __len__(self) -> int:
        return len(self.names)

    def frame(self) -> Any:
        """A pandas table: the name, and a column of probabilities for each class."""
        import pandas as pd

        columns = {"prediction": self.names}
        return pd.DataFrame(columns | dict(zip(self.classes, self.probabilities.T, strict=True)))

    def __repr__(self) -> str:
        first = [
            name if self.sets else f"{name} {p.max():.1%}"
            for name, p in zip(self.names[:MOST], self.probabilities[:MOST], strict=True)
        ]
        more = f", ... {len(self) - MOST} more" if len(self) > MOST else ""
        return f"Prediction of {len(self)} rows: {', '.join(first)}{more}"

    def _repr_html_(self) -> str:
        table: str = self.frame().head(20).to_html(float_format="{:.3f}".format)
        return table


@dataclass(frozen=True, eq=False)
class Numbers:
    """The predicted number of each row, values [n], in the units of y."""

    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

    def frame(self) -> Any:
        """A pandas table with the column "prediction"."""
        import pandas as pd

        return pd.DataFrame({"prediction": self.values})

    def __repr__(self) -> str:
        more = f", ... {len(self) - MOST} more" if len(self) > MOST else ""
        first = ", ".join(f"{v:.5g}" for v in self.values[:MOST])
        return f"Prediction of {len(self)} rows: {first}{more}"

    def _repr_html_(self) -> str:
        table: str = self.frame().head(20).to_html(float_format="{:.5g}".format)
        return table


def label_sets(probabilities: NDArray[np.float64], labels: Sequence[str]) -> Prediction:
    """The sets of labels with probability above 1/2, from [n, L], as "one+two", or "none"."""
    _refuse_nan(probabilities)
    sets = ["+".join(np.array(labels)[row]) or "none" for row in probabilities > 0.5]
    return Prediction(np.array(sets), probabilities, tuple(labels), sets=True)


def prediction(probabilities: NDArray[np.float64], classes: Sequence[str]) -> Prediction:
    """The classes with the largest probabilities, from [n, K]."""
    _refuse_nan(probabilities)
    names = np.array(classes)[probabilities.argmax(1)]
    return Prediction(names, probabilities, tuple(classes))


def _refuse_nan(probabilities: NDArray[np.float64]) -> None:
    """Raise InputError for rows without probabilities: they would get the first class."""
    if len(rows := np.flatnonzero(np.isnan(probabilities).any(1))):
        raise InputError(
            f"the model gives NaN for {len(rows)} of {len(probabilities)} rows, the first of them "
            f"row {rows[0]} (from 0); leave them out, or look at their values"
        )
