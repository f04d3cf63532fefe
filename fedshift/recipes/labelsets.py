"""Methods for clients that hold different labels, private or not, centrally tuned or not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Unpack, cast

from torch import Tensor

from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.labelsets import LabelSets, Mode
from fedshift.algorithms.scaffold import Option, Scaffold
from fedshift.algorithms.tuning import (
    HELD_OUT,
    CentralTuning,
    Moments,
    Over,
    Part,
    Stop,
    Temperature,
    Weights,
)
from fedshift.arguments import check_positive, check_whole
from fedshift.errors import InputError, unknown
from fedshift.recipes import one_model, personal
from fedshift.recipes.setting import Setting
from fedshift.recipes.traits import PersonalLam, ProximalMu, Traits, method

Made = TypeVar("Made", bound=Callable[..., Algorithm])
Tune = Literal["none", "mse", "pairwise", "kl"]
SetMode = Annotated[Mode, "who learns which labels a client holds"]
TunedPart = Annotated[Part, "what the server tunes"]
FirstRounds = Annotated[int, "the first rounds, in which the server tunes"]


class Shared(TypedDict, total=False):
    """The options of all four methods. tune_NAME is NAME of `CentralTuning`, with its default."""

    mode: SetMode
    slots: int | None
    tune: Tune
    tune_steps: int
    tune_lr: float
    tune_part: TunedPart
    tune_over: Over
    tune_rounds: FirstRounds
    tune_moments: Moments
    tune_weights: Weights
    tune_temperature: Temperature
    tune_stop: Stop


_OF_TUNING = {f"tune_{field.name}": field.default for field in fields(CentralTuning)}
_DEFAULTS = {"mode": "private", "slots": None, "tune": "none"} | {
    name: _OF_TUNING[name] for name in Shared.__annotations__ if name in _OF_TUNING
}


def _sharing(make: Made) -> Made:
    """The recipe with every option of `Shared` in its signature, in place of `shared`."""
    alone, kind = inspect.signature(make), inspect.Parameter.KEYWORD_ONLY
    texts = {name: hint.__forward_arg__ for name, hint in Shared.__annotations__.items()}
    shared = [
        inspect.Parameter(name, kind, default=default, annotation=texts[name])
        for name, default in _DEFAULTS.items()
    ]
    signature = alone.replace(parameters=[*list(alone.parameters.values())[:-1], *shared])

    @functools.wraps(make)
    def recipe(setting: Setting, **options: Any) -> Algorithm:
        for name in options.keys() - signature.parameters.keys():
            raise TypeError(f"{make.__name__}() got an unexpected keyword argument '{name}'")
        return make(setting, **{**_DEFAULTS, **options})

    annotations = {name: p.annotation for name, p in signature.parameters.items()}
    recipe.__annotations__ = annotations | {"return": signature.return_annotation}
    vars(recipe)["__signature__"] = signature
    return cast(Made, recipe)


@method(Traits(page="labelsets"))
@_sharing
def labelset_fedavg(setting: Setting, **shared: Unpack[Shared]) -> Algorithm:
    """FedAvg whose clients know, send and receive only their own labels' rows of the head.

    Reference: Breitholtz, Listo Zec and Johansson 2025, "Federated learning with heterogeneous and
    private label sets", arXiv 2508.18774.
    Note: mode "public" is FedAvg itself; tune pulls the server's model to the clients' models on
    the server's unlabeled inputs (in an experiment file [server] unlabeled); if every client has
    all labels it is FedAvg bit for bit.
    """
    return _tuned(setting, one_model.fedavg(setting), shared)


@method(Traits(page="labelsets"))
@_sharing
def labelset_fedprox(
    setting: Setting, *, mu: ProximalMu = 0.01, **shared: Unpack[Shared]
) -> Algorithm:
    """FedProx whose clients know, send and receive only their own labels' rows of the head.

    Reference: Breitholtz, Listo Zec and Johansson 2025, arXiv 2508.18774.
    Note: the pull acts on the body and on the rows received; mu = 0 is labelset_fedavg bit for bit.
    """
    return _tuned(setting, one_model.fedprox(setting, mu=mu), shared)


@method(Traits(page="labelsets"))
@_sharing
def labelset_scaffold(
    setting: Setting, *, option: Option = "II", **shared: Unpack[Shared]
) -> Algorithm:
    """SCAFFOLD with private label sets: controls have rows for a client's own labels alone.

    Reference: ours; the question is left open in Breitholtz, Listo Zec and Johansson 2025,
    arXiv 2508.18774.
    Note: each row of c is the mean over the clients that hold the label; with mode "public", or
    if every client has all labels, it is SCAFFOLD bit for bit.
    """
    return _tuned(setting, one_model.scaffold(setting, option=option), shared)


@method(Traits(page="labelsets"))
@_sharing
def labelset_ditto(
    setting: Setting, *, lam: PersonalLam = 1.0, **shared: Unpack[Shared]
) -> Algorithm:
    """Ditto with private label sets: personal models over a client's own labels alone.

    Reference: ours; the question is left open in Breitholtz, Listo Zec and Johansson 2025,
    arXiv 2508.18774.
    Note: the global model is labelset_fedavg's; if every client has all labels it is Ditto bit for
    bit.
    """
    return _tuned(setting, personal.ditto(setting, lam=lam), shared)


def _tuned(setting: Setting, inner: FedAvg | Scaffold | Ditto, shared: Shared) -> Algorithm:
    """`inner` with label sets and, unless tune is "none", central tuning."""
    tune = shared["tune"]
    how: dict[str, Any] = {k.removeprefix("tune_"): v for k, v in shared.items() if k in _OF_TUNING}
    # The seed of the slots' orders is the setting's, which clients do not know.
    plain = LabelSets(inner, shared["mode"], setting.head, shared["slots"], setting.seed)
    if tune == "none":
        _check_idle(how)
        return plain
    # Not left to CentralTuning: its message would not offer "none".
    if tune not in ("mse", "pairwise", "kl"):
        raise unknown("tune", str(tune), ("none", "mse", "pairwise", "kl"))
    inputs = _checked_inputs(setting, tune, how)
    return CentralTuning(
        plain, inputs, tune, head=setting.head, labelled=setting.server_examples,
        **how,
    )  # fmt: skip


def _checked_inputs(setting: Setting, tune: Tune, how: dict[str, Any]) -> Tensor:
    """The server's inputs, if all options of tuning go together.

    Raises InputError in the recipes' names, where CentralTuning would say its own, or nothing.
    """
    check_whole("tune_steps", how["steps"], 0)
    check_whole("tune_rounds", how["rounds"], 0)
    check_positive("tune_lr", how["lr"])
    if tune == "kl" and how["over"] == "union":
        raise InputError(
            'tune = "kl" compares models on each client\'s labels alone, and tune_over = "union" '
            'has no place in it; leave tune_over out, or set tune = "mse" or "pairwise"'
        )
    if setting.server_inputs is None:
        raise InputError(
            f'tune = "{tune}" needs unlabeled inputs on the server; give '
            "Setting(..., server_inputs=x), x [n, ...] like the clients' inputs"
        )
    if how["temperature"] == "fitted" and setting.server_examples is None:
        raise InputError(
            'tune_temperature = "fitted" needs labelled examples on the server; give '
            "Setting(..., server_examples=fedshift.data.Examples(x, y))"
        )
    if how["stop"] == "held-out" and len(setting.server_inputs) < HELD_OUT:
        raise InputError(
            f'tune_stop="held-out" holds out every fifth input of the server, which has '
            f"{len(setting.server_inputs)}; give it {HELD_OUT} or more, or leave tune_stop out"
        )
    _check_steps(setting, how)
    return setting.server_inputs


def _check_idle(how: dict[str, Any]) -> None:
    """Raise InputError for an option of tuning that was set where nothing is tuned."""
    for name, value in how.items():
        if value != _DEFAULTS[f"tune_{name}"]:
            raise InputError(
                f'tune_{name} is for central tuning, and with tune="none" there is none; set '
                f'tune="kl", "mse" or "pairwise", or leave tune_{name} out'
            )


def _check_steps(setting: Setting, how: dict[str, Any]) -> None:
    """Raise InputError for an option that without steps does nothing.

    Weights and a temperature do something where labelled examples measure the optima under them.
    """
    if how["steps"]:
        return
    idle = {"moments": "new", "stop": "steps"}
    if setting.server_examples is None:
        idle["weights"] = "round"
    for name, default in idle.items():
        if how[name] != default:
            raise InputError(
                f'tune_{name}="{how[name]}" is for steps of central tuning, and with tune_steps=0 '
                f"there are none; set tune_steps to 1 or more, or leave tune_{name} out"
            )
