"""Estimated log weights of examples against the true ones, on Gaussians whose ratio is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedshift import recipes
from fedshift.algorithms.feddisk import FedDisk
from fedshift.algorithms.weighing import Estimate, centred
from fedshift.client.importance import Pair, live
from fedshift.client.local import plan_all
from fedshift.data import ClientData, client_data, register
from fedshift.datasets import Wanted
from fedshift.engine.run import Federation, run
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.recipes.density import Density, Estimator
from fedshift.report.charts import Axis, LineChart, Series
from fedshift.report.svg import svg
from fedshift.report.tables import Table
from fedshift.seeds import Seeds
from fedshift_papers.datasets.worlds import CLIENTS, gaussian_world
from fedshift_papers.pictures.picture import Panel, Shown

DENSITY_ROUNDS = 20
# The range [-r, r] of inputs that each kind of density is given. Bernoulli densities clip inputs
# to it, so theirs is wide.
RANGES: dict[Density, float] = {"mixture": 2.0, "bernoulli": 4.0}
NAMES: dict[Density, str] = {"mixture": "mixtures", "bernoulli": "Bernoulli"}
ESTIMATORS: tuple[Estimator, ...] = ("direct", "classifier")
DRAWN = 150
TITLE = "Estimated against true log weights: Gaussians"
CHOSEN = (
    "Ours: three clients of 4,000 examples of four Gaussian numbers, means -1/2, 0 and 1/2; "
    "20 rounds of densities over all clients, a hidden layer of 50.",
    "Log weights are log p - log q_i less their mean over the client, before bounds. Slope: least "
    "squares of the estimated on the true ones, all clients together.",
    f"Drawn: {DRAWN} examples of each client.",
)


def estimates(
    density: Density, seed: int, rounds: int = DENSITY_ROUNDS, cohort: int | None = None
) -> dict[str, Estimate]:
    """The log weights by one kind of density ("mixture", "bernoulli"), for each estimator."""
    world = gaussian_world(Wanted(CLIENTS, seed))
    train, ratios = world.data.train, world.log_ratios
    assert ratios is not None
    clients = [client_data(train.x[r], train.y[r], i) for i, r in enumerate(world.parts)]
    network = build(lambda: Mlp((train.x.shape[1],), (), 2), seed)
    setting = Setting(network, (0.5, 0.5), shape=tuple(train.x.shape[1:]), seed=seed)
    high = RANGES[density]
    disks = {
        estimator: replace(
            recipes.feddisk(
                setting, estimator=estimator, density=density, density_rounds=rounds,
                hidden=(50,), low=-high, high=high,
            ),
            span=None,
        )
        for estimator in ESTIMATORS
    }  # fmt: skip
    federation = Federation(clients, *network.init(), register(clients, 2), Seeds.of(seed))
    *_, last = run(disks["direct"], federation, rounds, cohort=cohort)
    pairs = [(last.server["density"], last.states[i]["density"]) for i in range(CLIENTS)]
    truths = centred([ratios[rows] for rows in world.parts])
    return {
        name: Estimate(
            truths, centred([_log_ratio(disk, *of) for of in zip(pairs, clients, strict=True)])
        )
        for name, disk in disks.items()
    }


def _log_ratio(disk: FedDisk, pair: Pair, data: ClientData) -> NDArray[np.float64]:
    plans = plan_all(disk.ratio.phases(), data, disk.rounds + 1, 0, int(data.id))
    values, _ = disk.ratio(disk.network(), pair, data, plans)
    return np.asarray(values[live(data)].double())


def slopes(_dataset: str, seed: int, rounds: int) -> Shown:
    """Points and slopes of four estimates."""
    by_name = {
        f"{estimator}, {words}": one
        for density, words in NAMES.items()
        for estimator, one in estimates(density, seed, rounds or DENSITY_ROUNDS).items()
    }
    series = [_points(name, one) for name, one in by_name.items()]
    ends = (-2.0, 2.0)
    series.append(Series("as large as the true ones", ends, ends))
    chart = LineChart(TITLE, tuple(series), Axis("true log weight"), Axis("estimated log weight"))
    rows = tuple((name, one.slope, one.correlation) for name, one in by_name.items())
    table = Table(("Estimate", "Slope", "Correlation"), rows, ("", ".2f", ".2f"))
    return Shown({"slope.svg": Panel(svg(chart), TITLE)}, (table,))


def _points(name: str, one: Estimate) -> Series:
    """Some of the points, evenly spread over the clients: all of them would hide one another."""
    rows = np.linspace(0, len(one.true) - 1, CLIENTS * DRAWN).round().astype(int)
    x, y = (tuple(map(float, v[rows])) for v in (one.true, one.estimated))
    return Series(name, x, y, line=False)
