"""The router of a run folder."""

from __future__ import annotations

import csv
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedshift import recipes
from fedshift.errors import DataError, InputError
from fedshift.experiments.config import Config
from fedshift.experiments.folder import CONFIG, SUMMARY, summary_of
from fedshift.experiments.load import load_config
from fedshift.experiments.networks import network
from fedshift.experiments.settings import setting
from fedshift.experiments.task import prepare
from fedshift.model import Model
from fedshift.router.route import Router
from fedshift.router.score import Prior
from fedshift.tree import Parts, unflatten

MODEL, CLIENTS = "model.safetensors", "clients.csv"


def load_router(
    folder: Path | str, prior: Prior = "posterior", *, shape: tuple[int, ...] | None = None
) -> Router:
    """The router of a complete run of FedDRM, as it was after the last round.

    shape: of one input, as (1, 28, 28); left out, it is looked up in the run's data set, which must
    be there then. Clients that keep nothing of their own (feddrm_shared_head) all count as taking
    part. Inputs of queries go through what the run's went through (`Prepared.task` has them).

    Raises InputError for a folder that is none, not complete, or of another method, and DataError
    for files that are missing or damaged.
    """
    place = Path(folder)
    config = _configured(place)
    parts, sizes = _parts(place / MODEL), _sizes(place / CLIENTS)
    model = _network(config, place, len(sizes), shape)
    classes = len(summary_of(place)["classes"])
    method = recipes.recipe(config.method.name).make(
        setting(config, model, (1.0 / classes,) * classes), **config.method.options
    )
    _check_names(place, model, parts)
    server = {"params": parts["params"], "buffers": parts["buffers"], "table": {"n": sizes}}
    return Router.of(method, server, _states(config, parts, sizes), prior)


def _configured(folder: Path) -> Config:
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder}: not a run folder (no {CONFIG}); give one that `fedshift run` has left"
        )
    config = load_config(folder / CONFIG)
    if config.method.name not in recipes.routed.__all__:
        raise InputError(
            f'{folder}: a run of "{config.method.name}", which trains no router; give one of '
            f"{' or '.join(recipes.routed.__all__)}"
        )
    if not (folder / SUMMARY).is_file():
        raise InputError(
            f"{folder}: this run is not complete; `fedshift run --resume {folder}` goes on with it"
        )
    return config


def _parts(path: Path) -> Parts:
    try:
        return unflatten(load_file(path), ("params", "buffers"))
    except FileNotFoundError:
        raise DataError(f"{path}: missing; the router is in it, train again") from None
    except (OSError, safetensors.SafetensorError) as e:
        raise DataError(f"{path}: cannot be read: {e}") from None


def _sizes(path: Path) -> Tensor:
    try:
        with path.open(encoding="utf-8", newline="") as f:
            n = [float(row["n"]) for row in csv.DictReader(f)]
    except (OSError, KeyError, ValueError) as e:
        raise DataError(f"{path}: cannot be read: {e}; it has the clients' sizes") from None
    return torch.tensor(n, dtype=torch.float64)


def _network(config: Config, folder: Path, clients: int, shape: tuple[int, ...] | None) -> Model:
    if shape is None:
        return prepare(config).model
    classes = len(summary_of(folder)["classes"])
    return network(config.model, shape, classes, config.seeds.resolved().init, clients)


def _check_names(folder: Path, model: Model, parts: Parts) -> None:
    """What is stored must be this network's, in names and shapes."""
    held = {k: tuple(v.shape) for tree in parts.values() for k, v in tree.items()}
    own = {k: tuple(v.shape) for tree in model.init() for k, v in tree.items()}
    odd = sorted(k for k in own.keys() | held.keys() if held.get(k) != own.get(k))
    if odd:
        raise DataError(
            f'{folder / MODEL}: "{odd[0]}" is {held.get(odd[0], "missing")} and in the network of '
            f"{CONFIG} {own.get(odd[0], 'missing')}; give the shape of one input as in training"
        )


def _states(config: Config, parts: Parts, sizes: Tensor) -> dict[int, Parts]:
    """Client id -> its own parts, for those that took part."""
    states: dict[int, Parts] = {}
    for part, tree in parts.items():
        owner, _, name = part.partition(".")
        if name:
            states.setdefault(int(owner.removeprefix("client")), {})[name] = tree
    if config.method.name == "feddrm_shared_head":
        states = {i: {} for i in range(len(sizes))}
    return {i: {"private": {}, "private_buffers": {}} | own for i, own in states.items()}
