"""Methods that fit densities of the inputs before they train."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal, get_args

from fedshift.algorithms.feddisk import LOCAL, FedDisk
from fedshift.client.importance import Classified, Direct, Equal, Known, Ratio
from fedshift.client.schedules import Cosine
from fedshift.errors import InputError, check_name
from fedshift.model import Model, build
from fedshift.models.made import Discriminator, Made, MixtureMade, Ordering
from fedshift.recipes import one_model
from fedshift.recipes.setting import Setting
from fedshift.recipes.traits import ContrastiveMu, Some, Temperature, Traits, method
from fedshift.seeds import key
from fedshift.server.combine import Mean
from fedshift.server.weights import Uniform

Estimator = Literal["direct", "classifier", "true", "equal"]
Density = Literal["auto", "bernoulli", "mixture"]


def check_widths(name: str, given: tuple[int, ...]) -> None:
    """Raise InputError for a layer of no units."""
    if not all(v >= 1 for v in given):
        raise InputError(f"{name} must be widths of 1 or more, such as (500,); got {given}")


Widths = Annotated[tuple[int, ...], check_widths]

LR = 1e-3  # of Adam, for densities
RATIO_EPOCHS = 10
TAU = 0.5
# Our choice, by made/participation: weights that lowered the loss were worth 32 % or more of every
# client's examples, and those that raised it 15 % (estimated) or 22 % (true).
USEFUL = 0.3
MOST, LEAST_ESS = 10.0, 0.15
LOW, HIGH = -1.0, 1.0
# Mixtures clip nothing, but their components start within [low, high], and Adam does not bring them
# far: on Gaussians with half of the values beyond it, weights had nothing to do with the true ones.
REACH = 5.0


def _density(
    setting: Setting, kind: Density, hidden: tuple[int, ...], ordering: Ordering, low: float,
    high: float,
) -> Model | None:  # fmt: skip
    """MADE for the setting's inputs; None where their shape is unknown, which `FedDisk` refuses."""
    shape, seed = setting.shape, setting.seed
    net = Made if kind == "bernoulli" else MixtureMade
    if shape is None:
        net((2,), hidden, ordering=ordering, low=low, high=high)  # refuses bad options right away
        return None
    return build(
        lambda: net(shape, hidden, seed=seed, ordering=ordering, low=low, high=high),
        key(seed, "density"),
    )


def _kind(setting: Setting, density: Density) -> Density:
    """The kind of density: "auto" is Bernoulli for binary inputs and images, else mixtures."""
    check_name("density of feddisk", density, ("auto", "bernoulli", "mixture"))
    if density != "auto":
        return density
    image = setting.shape is not None and len(setting.shape) > 1
    return "bernoulli" if setting.two_values or image else "mixture"


def _range(setting: Setting, density: Density, low: float, high: float) -> tuple[float, float]:
    """(low, high) of the density; of inputs of two values these, or the two would be grey."""
    two = setting.two_values
    if density != "auto" or not two:
        return low, high
    if (low, high) not in ((LOW, HIGH), two):
        raise InputError(
            f'all inputs are {two[0]:g} or {two[1]:g}, which density="auto" takes for low and '
            f"high, and not {low:g} and {high:g}; leave low and high out, or set density"
        )
    return two


def _rate(setting: Setting, kind: Density, rounds: int) -> float | Cosine:
    """Of Adam in the density rounds."""
    # To 0 where the likelihood is a density: a mean of networks that have drifted apart is too
    # flat, which made log weights a fifth too large. Grey values keep the rate of the report.
    falls = kind == "mixture" or setting.two_values is not None
    return Cosine(LR, rounds) if falls else LR


def _ratio(setting: Setting, estimator: Estimator, temper: float, epochs: int) -> Ratio:
    # Without a shape `FedDisk` refuses to start, so any width will do here.
    inputs = math.prod(setting.shape or (1,))
    net = build(lambda: Discriminator(inputs), key(setting.seed, "discriminator"))
    training = replace(LOCAL, epochs=epochs)
    ratios: dict[str, Callable[[], Ratio]] = {
        "classifier": lambda: Classified(net, training, temper),
        "direct": lambda: Direct(temper),
        "true": lambda: Known(setting.log_ratios),
        "equal": Equal,
    }
    check_name("estimator of feddisk", estimator, ratios)
    return ratios[estimator]()


# Options that an estimator leaves nothing to do, with values that ask nothing: a row's options do
# for its control. hidden, density and the range are taken with all: they say which inputs are
# refused.
NO_DENSITY = ("true", "equal")
IDLE: dict[str, tuple[tuple[str, ...], tuple[object, ...]]] = {
    "temper": (NO_DENSITY, (1.0,)),
    "density_epochs": (NO_DENSITY, (1,)),
    "ordering": (NO_DENSITY, ("natural",)),
    "ratio_epochs": (("direct", *NO_DENSITY), (RATIO_EPOCHS,)),
    "most": (("equal",), (MOST,)),
    "useful": (("equal",), (USEFUL, 0.0)),
    "least_ess": (("equal",), (LEAST_ESS, 0.0)),
}


def _check_idle(estimator: Estimator, **options: object) -> None:
    """Raise InputError for an option that changes nothing with this estimator."""
    for name, value in options.items():
        estimators, idle = IDLE[name]
        if estimator in estimators and value not in idle:
            others = " or ".join(f'"{v}"' for v in get_args(Estimator) if v not in estimators)
            raise InputError(
                f'{name} changes nothing with estimator="{estimator}"; set estimator={others}, or '
                f"leave {name} out"
            )


def _check_rounds_left(setting: Setting, before: int) -> None:
    """Raise InputError if the setting's rounds leave none to train in."""
    if setting.rounds is not None and setting.rounds <= before:
        raise InputError(
            f"rounds={setting.rounds} of the run, of which the first {before} fit densities and "
            "weigh examples (density_rounds + weighing_rounds), leave none to train; for T rounds "
            f"of training give Setting(rounds={before} + T)"
        )


@method(Traits(densities=True))
def feddisk(
    setting: Setting,
    *,
    estimator: Estimator = "direct",
    density_rounds: Some = 20,
    density_epochs: Some = 1,
    weighing_rounds: Some = 1,
    hidden: Widths = (500,),
    ordering: Ordering = "natural",
    density: Density = "auto",
    ratio_epochs: Some = RATIO_EPOCHS,
    temper: float = 1.0,
    most: float = MOST,
    least_ess: float = LEAST_ESS,
    useful: float = USEFUL,
    low: float = LOW,
    high: float = HIGH,
    mu: ContrastiveMu = 0.0,
    tau: Temperature = TAU,
) -> FedDisk:
    """Weigh examples by how much likelier they are in all clients' data than in the client's own.

    Reference: Nguyen, Wu and Chang 2024, "Federated learning for distribution skewed data using
    sample weights" (FedDisk), arXiv 2401.02586.
    Note: the run's rounds are density_rounds + weighing_rounds + those of training; inputs lie in
    [low, high]; ratios are raised to temper; a client whose weights are worth less than the share
    useful of its examples keeps weights of 1; mu > 0 trains by MOON.
    """
    _check_idle(
        estimator, temper=temper, ratio_epochs=ratio_epochs, density_epochs=density_epochs,
        ordering=ordering, most=most, least_ess=least_ess, useful=useful,
    )  # fmt: skip
    if LEAST_ESS < least_ess <= useful < 1.0:
        raise InputError(
            f"least_ess={least_ess:g} ends no run where useful={useful:g}: weights worth less than "
            "useful are 1 before least_ess is asked; set useful=0, or leave least_ess out"
        )
    if tau != TAU and not mu:
        raise InputError(
            f"tau is the temperature of MOON's term, and with mu={mu:g} there is none; set mu "
            "above 0, or leave tau out"
        )
    inner = one_model.moon(setting, mu=mu, tau=tau)
    _check_rounds_left(setting, density_rounds + weighing_rounds)
    # After the checks of counts: a network of width 0 would fail in torch's words.
    kind = _kind(setting, density)
    low, high = _range(setting, density, low, high)
    network = _density(setting, kind, hidden, ordering, low, high)
    ratio = _ratio(setting, estimator, temper, ratio_epochs)
    local = replace(LOCAL, epochs=density_epochs, lr=_rate(setting, kind, density_rounds))
    rounds = density_rounds, weighing_rounds
    disk = FedDisk(inner, network, ratio, *rounds, local, most, least_ess, (low, high), useful)
    return replace(disk, reach=REACH) if kind == "mixture" else disk


@method(Traits(page="feddisk", densities=True, fixes_weights=True))
def made(
    setting: Setting,
    *,
    density_rounds: Some = 20,
    weighing_rounds: Some = 1,
    hidden: Widths = (500,),
    least_ess: float = LEAST_ESS,
    low: float = LOW,
    high: float = HIGH,
) -> FedDisk:
    """FedDisk with the classifier's ratio and clients' models averaged uniformly.

    Reference: the method "MADE" of the MADE/MOON report on EMNIST-Digits (feature shift by writers
    and noise, Table I), after Nguyen, Wu and Chang 2024, arXiv 2401.02586.
    Note: uniform averages as in the report, by size for the density; its FedAvg is uniform, too.
    """
    disk = feddisk(
        setting,
        density_rounds=density_rounds,
        weighing_rounds=weighing_rounds,
        hidden=hidden,
        estimator="classifier",
        density="bernoulli",
        least_ess=least_ess,
        useful=0.0,
        low=low,
        high=high,
    )
    return replace(disk, inner=replace(one_model.fedavg(setting), combine=Mean(Uniform())))
