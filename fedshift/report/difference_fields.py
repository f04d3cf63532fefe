"""What `summary.json` says of clients whose inputs differ, and of the weights of examples."""

from __future__ import annotations

from dataclasses import dataclass

from fedshift.report.serving_fields import Matrix, Portion, Score


@dataclass(frozen=True)
class Differences:
    """`summary.json`: [d][d] for the d `clients`, null where a pair has no value.

    mean is over these pairs; mean_all, without domain_auc, over all pairs of clients. looks [M]
    says what each client's inputs go through; null where only their origins differ.
    """

    clients: tuple[int, ...]
    examples: int
    domain_auc: Matrix
    js: Matrix
    hellinger: Matrix
    variation: Matrix
    mean: dict[str, Portion | None]
    mean_all: dict[str, Portion | None]
    looks: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Importance:
    """`summary.json`: effective sizes of the example weights [M], null for clients without any."""

    ess: tuple[Score | None, ...]
    share: tuple[Portion | None, ...]


def lengths(
    apart: Differences | None, weights: Importance | None, clients: int
) -> list[tuple[str, int, int]]:
    """(name, entries found, entries needed) of every list."""
    found: list[tuple[str, int, int]] = []
    if weights is not None:
        found.append(("importance.ess", len(weights.ess), clients))
        found.append(("importance.share", len(weights.share), clients))
    if apart is not None:
        d = len(apart.clients)
        for name in ("domain_auc", "js", "hellinger", "variation"):
            matrix = getattr(apart, name)
            found.append((f"differences.{name}", len(matrix), d))
            found += [(f"differences.{name}.{i}", len(row), d) for i, row in enumerate(matrix)]
        if apart.looks is not None:
            found.append(("differences.looks", len(apart.looks), clients))
    return found
