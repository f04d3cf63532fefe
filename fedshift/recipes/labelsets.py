"""Methods for clients that hold different labels, private or not, centrally tuned or not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Unpack, cast, get_args

from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.labelsets import LabelSets, Mode
from fedshift.algorithms.method import Method
from fedshift.algorithms.scaffold import Option
from fedshift.algorithms.tuning import (
    CentralTuning,
    Moments,
    Over,
    Part,
    Stop,
    Temperature,
    Weights,
)
from fedshift.errors import InputError, check_name
from fedshift.recipes import one_model, personal
from fedshift.recipes.setting import Setting
from fedshift.recipes.traits import PersonalLam, ProximalMu, Traits, method

Made = TypeVar("Made", bound=Callable[..., Method])
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
    def recipe(setting: Setting, **options: Any) -> Method:
        for name in options.keys() - signature.parameters.keys():
            raise TypeError(f"{make.__name__}() got an unexpected keyword argument '{name}'")
        return make(setting, **{**_DEFAULTS, **options})

    annotations = {name: p.annotation for name, p in signature.parameters.items()}
    recipe.__annotations__ = annotations | {"return": signature.return_annotation}
    vars(recipe)["__signature__"] = signature
    return cast(Made, recipe)


@method(Traits(page="labelsets"))
@_sharing
def labelset_fedavg(setting: Setting, **shared: Unpack[Shared]) -> Method:
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
) -> Method:
    """FedProx whose clients know, send and receive only their own labels' rows of the head.

    Reference: Breitholtz, Listo Zec and Johansson 2025, arXiv 2508.18774.
    Note: the pull acts on the body and on the rows received; mu = 0 is labelset_fedavg bit for bit.
    """
    return _tuned(setting, one_model.fedprox(setting, mu=mu), shared)


@method(Traits(page="labelsets"))
@_sharing
def labelset_scaffold(
    setting: Setting, *, option: Option = "II", **shared: Unpack[Shared]
) -> Method:
    """SCAFFOLD with private label sets: controls have rows for a client's own labels alone.

    Reference: ours; the question is left open in Breitholtz, Listo Zec and Johansson 2025,
    arXiv 2508.18774.
    Note: each row of c is the mean over the clients that hold the label; with mode "public", or
    if every client has all labels, it is SCAFFOLD bit for bit.
    """
    return _tuned(setting, one_model.scaffold(setting, option=option), shared)


@method(Traits(page="labelsets"))
@_sharing
def labelset_ditto(setting: Setting, *, lam: PersonalLam = 1.0, **shared: Unpack[Shared]) -> Method:
    """Ditto with private label sets: personal models over a client's own labels alone.

    Reference: ours; the question is left open in Breitholtz, Listo Zec and Johansson 2025,
    arXiv 2508.18774.
    Note: the global model is labelset_fedavg's; if every client has all labels it is Ditto bit for
    bit.
    """
    return _tuned(setting, personal.ditto(setting, lam=lam), shared)


def _tuned(setting: Setting, inner: FedAvg | Ditto, shared: Shared) -> Method:
    """`inner` with label sets and, unless tune is "none", central tuning."""
    tune = shared["tune"]
    how: dict[str, Any] = {k.removeprefix("tune_"): v for k, v in shared.items() if k in _OF_TUNING}
    # The seed of the slots' orders is the setting's, which clients do not know.
    plain = LabelSets(inner, shared["mode"], setting.head, shared["slots"], setting.seed)
    check_name("tune", tune, get_args(Tune))
    if tune == "none":
        _check_idle('tune="none"', how, [*how], 'set tune="kl", "mse" or "pairwise"')
        return plain
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
    if not how["steps"]:
        # Weights do something where labelled examples measure the optima under them.
        names = ["moments", "stop", *(["weights"] if setting.server_examples is None else [])]
        _check_idle("tune_steps=0", how, names, "set tune_steps to 1 or more")
    return CentralTuning(
        plain, setting.server_inputs, tune, head=setting.head, labelled=setting.server_examples,
        **how,
    )  # fmt: skip


def _check_idle(beside: str, how: dict[str, Any], names: Iterable[str], cure: str) -> None:
    """Raise InputError for an option of tuning that changes nothing beside another's value."""
    for name in names:
        if how[name] != _DEFAULTS[f"tune_{name}"]:
            raise InputError(
                f"tune_{name} changes nothing with {beside}; {cure}, or leave tune_{name} out"
            )
