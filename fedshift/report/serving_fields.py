"""What `summary.json` says where clients serve models of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

# A little over 1: some are sums of fractions.
Portion = Annotated[float, Field(ge=0, le=1 + 1e-9, allow_inf_nan=False)]
Score = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Matrix = tuple[tuple[Portion | None, ...], ...]


@dataclass(frozen=True)
class RouterDetails:
    """How a router does on all test examples: sent, auc [M][M], coverage and risk [P].

    sent[i][j] is the share of client i's queries that are sent to client j.
    """

    sent: Matrix
    auc: Matrix
    coverage: tuple[Portion, ...]
    risk: tuple[Portion, ...]
    aurc: Portion
    ece: Portion
    brier: Score


@dataclass(frozen=True)
class Serving:
    """Own models on own test examples: class_accuracy [M][K], client_accuracy [M].

    looks [M] says what each client's inputs go through. Folders of the first versions lack looks
    and client_accuracy.
    """

    class_accuracy: Matrix
    router: RouterDetails | None
    client_accuracy: tuple[Portion | None, ...] | None = None
    looks: tuple[str, ...] | None = None

    def lengths(self, clients: int, classes: int) -> list[tuple[str, int, int]]:
        """(name, entries found, entries needed) of every list."""
        M, K = clients, classes
        found = [("class_accuracy", len(self.class_accuracy), M)]
        found += [(f"class_accuracy.{i}", len(row), K) for i, row in enumerate(self.class_accuracy)]
        if self.client_accuracy is not None:
            found.append(("client_accuracy", len(self.client_accuracy), M))
        if self.looks is not None:
            found.append(("looks", len(self.looks), M))
        if self.router is not None:
            for name, matrix in (("sent", self.router.sent), ("auc", self.router.auc)):
                found.append((f"router.{name}", len(matrix), M))
                found += [(f"router.{name}.{i}", len(row), M) for i, row in enumerate(matrix)]
            found.append(("router.risk", len(self.router.risk), len(self.router.coverage)))
        return [(f"serving.{name}", has, needed) for name, has, needed in found]


def _of_rounds(last: dict[str, Any]) -> dict[str, Any]:
    for name in ("round", "rounds", "system_accuracy"):
        if not isinstance(last.get(name), int | float):
            raise ValueError(f'a number "{name}" is needed')
    return last


# Means over the last rounds by name, and their deviations by name and "_sd".
Last = Annotated[
    dict[str, Annotated[float, Field(allow_inf_nan=False)] | Literal["inf", "-inf"] | None],
    AfterValidator(_of_rounds),
]

SERVING = TypeAdapter(Serving)
