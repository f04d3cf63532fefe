"""FedPALS' Figures 1 and 4: weights of clients at several effective sample sizes (ESS)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedshift.errors import InputError
from fedshift.report.charts import Axis, LineChart, Series
from fedshift.report.looks import look_of
from fedshift.report.svg import svg
from fedshift.report.tables import Table
from fedshift.server.pals import PalsWeights, pals_weights
from fedshift_papers.pictures.federations import Federation
from fedshift_papers.pictures.picture import Panel, Shown
from fedshift_papers.pictures.simplex import Simplex, simplex_svg

# Effective sample sizes as fractions of all examples; 0 stands for lambda = 0.
ESS = (0.0, 0.25, 0.5, 0.75)
# How many points are drawn of the path that mixtures take as lambda grows.
PATH = 60
SIMPLEX = "Clients, target and weights in the simplex of three labels"
BY_CLIENT = "Weights of clients by effective sample size"


@dataclass(frozen=True)
class WeightsRow:
    """The weights at one effective sample size."""

    label: str
    solved: PalsWeights


def weighed(federation: Federation) -> list[WeightsRow]:
    """The weights at each fraction of `ESS`, the smallest first.

    A fraction that is no larger than the ESS of lambda = 0 gives the same weights, and is left out.
    """
    made: list[WeightsRow] = []
    for fraction in ESS:
        given: dict[str, float] = {"ess": fraction} if fraction else {"lam": 0.0}
        solved = pals_weights(federation.counts, federation.target, **given)  # type: ignore[arg-type]
        label = f"ESS {100 * fraction:g} %" if fraction else "lambda = 0"
        if all(solved.lam != one.solved.lam for one in made):
            made.append(WeightsRow(label, solved))
    return made


def in_simplex(federation: Federation) -> Shown:
    """The triangle of three labels. Raises InputError for another number of labels."""
    labels = len(federation.classes)
    if labels != 3:
        cure = "merge columns, or draw" if labels > 3 else "draw"
        raise InputError(
            f"fedpals/fig1 shows three labels, the counts have {labels}; {cure} fedpals/fig4"
        )
    panel = Panel(simplex_svg(_simplex(federation)), SIMPLEX)
    return Shown({"simplex.svg": panel}, (_numbers(federation),), (federation.source,))


def by_client(federation: Federation) -> Shown:
    """The weights of all clients, as a chart and a table."""
    panel = Panel(svg(weights_chart(federation)), BY_CLIENT)
    return Shown({"weights.svg": panel}, (_numbers(federation),), (federation.source,))


def weights_chart(federation: Federation) -> LineChart:
    """A line per effective sample size; clients are in order of size, FedAvg's weights are dots."""
    sizes = federation.counts.sum(1)
    order = np.argsort(-sizes, kind="stable")
    x = tuple(float(k) for k in range(1, len(order) + 1))
    lines = [
        Series(f"FedPALS, {one.label}", x, tuple(one.solved.weights[order].tolist()))
        for one in weighed(federation)
    ]
    shares = tuple((sizes / sizes.sum())[order].tolist())
    dots = Series("FedAvg", x, shares, look=look_of("fedavg"), line=False)
    across = Axis("client, the largest first")
    return LineChart(BY_CLIENT, (*lines, dots), across, Axis("weight", zero=True))


def _simplex(federation: Federation) -> Simplex:
    counts, target = federation.counts, federation.target
    sizes = counts.sum(1)
    there = sizes > 0
    rows = counts[there] / sizes[there, None]
    named = weighed(federation)
    nearest = named[0].solved
    # Even steps in ESS, from that of lambda = 0 to all examples: lambda itself grows to infinity.
    steps = np.linspace(nearest.ess_fraction, 1.0, PATH)[1:]
    solved = [nearest, *(pals_weights(counts, target, ess=f) for f in steps)]
    return Simplex(
        SIMPLEX,
        federation.classes,
        tuple(n for n, some in zip(federation.clients, there, strict=True) if some),
        rows,
        sizes[there],
        target,
        sizes[there] / sizes.sum() @ rows,
        np.array([one.weights[there] @ rows for one in solved]),
        tuple((f"FedPALS, {n.label}", n.solved.weights[there] @ rows) for n in named),
    )


def _numbers(federation: Federation) -> Table:
    """A table with a row per effective sample size, and one for FedAvg."""
    sizes = federation.counts.sum(1)
    every = pals_weights(federation.counts, federation.target, lam=np.inf)
    lines = [*weighed(federation), WeightsRow("FedAvg", every)]
    rows = tuple(
        (
            one.label,
            one.solved.lam,
            one.solved.ess_fraction,
            float(np.square(one.solved.residual).sum()),
            float(one.solved.weights.max()),
            int(((one.solved.weights == 0) & (sizes > 0)).sum()),
        )
        for one in lines
    )
    header = ("Weights", "Lambda", "ESS", "||T - S'a||²", "Largest weight", "Clients left out")
    return Table(header, rows, ("", ".4g", ".1%", ".4f", ".4f", "d"))
