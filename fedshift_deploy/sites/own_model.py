"""The model that a site of a federation serves: how it is written to its folder and read back.

Each run has a folder models/RUN with the tensors, the experiment, and the shape of one input.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save
from torch import nn

from fedshift import recipes
from fedshift.arguments import check_path
from fedshift.errors import DataError
from fedshift.experiments.config.load import load_config
from fedshift.experiments.folder.model_file import Pair, check_fit, read_parts
from fedshift.experiments.task.first_model import named_network
from fedshift.files import read_object, write
from fedshift.record.folder import CONFIG, MODEL
from fedshift.tree import flatten

MODELS, ABOUT = "models", "about.json"


def leave_own_model(folder: Path, text: str, pair: Pair, **about: object) -> None:
    """Write a client's model over that of an earlier round; text: the experiment's TOML."""
    parts = {"params": pair[0], "buffers": pair[1]}
    # Cloned, because tensors may share memory, which safetensors refuses.
    write(folder / MODEL, save({k: v.contiguous().clone() for k, v in flatten(parts).items()}))
    write(folder / CONFIG, text)
    write(folder / ABOUT, json.dumps(about) + "\n")


def load_own_model(folder: Path | str) -> nn.Module:
    """The network that a site serves, in evaluation mode; folder: client-I/models/RUN.

    Inputs must be preprocessed as the client's training inputs were. Raises DataError for files
    that are missing or damaged.
    """
    check_path("folder", folder)
    place = Path(folder)
    about, config = read_object(place / ABOUT), load_config(place / CONFIG)
    try:
        shape = tuple(map(int, about["shape"]))
        classes, clients = int(about["classes"]), int(about["clients"])
    except (LookupError, TypeError, ValueError) as e:
        raise DataError(f"{place / ABOUT}: damaged ({type(e).__name__}: {e})") from None
    traits = recipes.traits_of(config.method.name)
    seed = config.seeds.resolved().init
    model = named_network(config.model, traits, shape, classes, seed, clients, None)
    parts = read_parts(place / MODEL)
    check_fit(place / MODEL, model, [(parts["params"], parts["buffers"])])
    return model.loaded(parts["params"], parts["buffers"])
