"""What a model says of raw rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 5


@dataclass(frozen=True, eq=False)
class Prediction:
    """The most probable class of each row by name, names [n], and probabilities [n, K]."""

    names: NDArray[np.str_]
    probabilities: NDArray[np.float64]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def frame(self) -> Any:
        """A pandas table: the name, and a column of probabilities for each class."""
        import pandas as pd

        columns = {"prediction": self.names}
        return pd.DataFrame(columns | dict(zip(self.classes, self.probabilities.T, strict=True)))

    def __repr__(self) -> str:
        first = [
            f"{name} {p.max():.1%}"
            for name, p in zip(self.names[:MOST], self.probabilities[:MOST], strict=True)
        ]
        more = f", ... {len(self) - MOST} more" if len(self) > MOST else ""
        return f"Prediction of {len(self)} rows: {', '.join(first)}{more}"

    def _repr_html_(self) -> str:
        table: str = self.frame().head(20).to_html(float_format="{:.3f}".format)
        return table


def prediction(probabilities: NDArray[np.float64], classes: Sequence[str]) -> Prediction:
    """The classes of the largest probabilities [n, K]."""
    names = np.array(classes)[probabilities.argmax(1)]
    return Prediction(names, probabilities, tuple(classes))
