"""Loading the models of a complete run from its folder."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from fedshift import recipes
from fedshift.arguments import check_path
from fedshift.errors import DataError, InputError, shown
from fedshift.experiments.config.custom_network import Shape, custom_network
from fedshift.experiments.config.load import load_config
from fedshift.experiments.config.named_files import check_files
from fedshift.experiments.config.python_names import is_python
from fedshift.experiments.config.schema import Config
from fedshift.experiments.folder.model_file import (
    ON_SITES,
    WHO,
    Applied,
    Pair,
    check_fit,
    complete,
    correction_in,
    read_parts,
    same_bits,
    served_in,
    took_part,
)
from fedshift.experiments.task.first_model import named_network
from fedshift.experiments.task.preparing import prepare
from fedshift.files import is_file, read_object
from fedshift.model import Model
from fedshift.record.folder import CLIENTS, CONFIG, ENCODING, MODEL, SUMMARY
from fedshift.record.summary import first_error
from fedshift.tasks.encoding import Encoding


@dataclass(frozen=True, eq=False)
class RunModels:
    """The models of a run's last round.

    model      the network
    shared     (parameters, buffers) of the server, without what every client keeps to itself
    served     (parameters, buffers) that each client serves, by id; () if only the server's model
               was tested
    took_part  ids of the clients that were drawn in some round; the others serve the first model
    on_sites   True if each client's model stayed at its site; `served` is () then
    corrected  the correction of `shared` for the target (`training.prior`); None for none
    """

    model: Model
    shared: Pair = field(repr=False)
    served: tuple[Pair, ...] = field(repr=False)
    took_part: tuple[int, ...]
    on_sites: bool = False
    corrected: Applied | None = field(default=None, repr=False)

    @property
    def uncorrected(self) -> Pair:
        """The server's model as it was trained, before any correction."""
        before = self.corrected.before if self.corrected else {}
        return self.shared[0] | before, self.shared[1]

    @property
    def personal(self) -> bool:
        """Whether any client serves a model that differs from the server's."""
        return any(
            not same_bits(shared.get(k), v)
            for pair in self.served
            for shared, tree in zip(self.shared, pair, strict=True)
            for k, v in tree.items()
        )


def load_models(
    folder: Path | str, *, shape: tuple[int, ...] | None = None, model: Model | None = None
) -> RunModels:
    """Every model that a complete run served, as it was after the last round.

    shape: of one input, as (1, 28, 28). If left out it is looked up in the run's data set, which
    must then be on this machine. model: the network, if a program built it. Inputs must be
    preprocessed as the run's were (`Prepared.task` has them).

    Raises InputError for a folder that is no complete run, or of a version that did not keep all
    models, and DataError for files that are missing or damaged.
    """
    check_path("folder", folder)
    place = Path(folder)
    config = complete_config(place)
    path, parts = place / MODEL, read_parts(place / MODEL)
    per_client = config.shift.target == "clients"
    if per_client and WHO not in parts:
        raise InputError(
            f"{path}: of a version of fedshift that did not keep the models of all clients; run "
            "it again, or read the parts that are there with "
            "fedshift.experiments.folder.model_file.read_parts"
        )
    clients = len(sizes_in(place / CLIENTS))
    model = network_of(config, place, clients, shape) if model is None else model
    participants = took_part(parts, clients, path) if per_client else ()
    shared = (parts["params"], parts["buffers"])
    corrected = correction_in(parts, path)
    if per_client and ON_SITES in parts[WHO]:
        check_fit(path, model, [complete(parts)])
        return RunModels(model, shared, (), participants, on_sites=True)
    served = (
        tuple(served_in(parts, i, i in participants) for i in range(clients)) if per_client else ()
    )
    check_fit(path, model, served if per_client else (shared,))
    return RunModels(model, shared, served, participants, corrected=corrected)


def complete_config(folder: Path) -> Config:
    """The configuration of a complete run. Raises InputError for other folders."""
    if not is_file(folder / CONFIG):
        raise InputError(
            f"{folder}: not a run folder (no {CONFIG}); give one that `fedshift run` has left"
        )
    config = load_config(folder / CONFIG)
    if not is_file(folder / SUMMARY):
        raise InputError(
            f"{folder}: this run is not complete; `fedshift run --resume {folder}` goes on with it"
        )
    return config


def classes_in(folder: Path) -> tuple[str, ...]:
    """The names of a run's classes. Raises DataError for a damaged summary."""
    names = read_object(folder / SUMMARY).get("classes")
    if not isinstance(names, list) or not names:
        raise DataError(f"{folder / SUMMARY}: damaged (it does not name the classes)")
    return tuple(map(str, names))


def encoding_in(folder: Path) -> Encoding | None:
    """How a run's rows were encoded as inputs; None for a run on one of the library's data sets.

    Raises DataError for a damaged file.
    """
    path = folder / ENCODING
    if not is_file(path):
        return None
    try:
        return Encoding.from_json(path.read_text("utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as e:
        what = first_error(e) if isinstance(e, ValidationError) else shown(str(e), 200)
        raise DataError(f"{path}: damaged ({what}); run the experiment again") from None


def sizes_in(path: Path) -> Tensor:
    """The clients' sizes [M] in clients.csv. Raises DataError where it cannot be read."""
    try:
        with path.open(encoding="utf-8", newline="") as f:
            n = [float(row["n"]) for row in csv.DictReader(f)]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as e:
        raise DataError(
            f"{path}: cannot be read: {shown(str(e), 200)}; it has the clients' sizes"
        ) from None
    if not n or not all(math.isfinite(v) and v >= 0 for v in n):
        raise DataError(f"{path}: cannot be read: sizes of {n[:3]}; it has the clients' sizes")
    return torch.tensor(n, dtype=torch.float64)


def input_shape(config: Config, folder: Path) -> tuple[int, ...]:
    """The shape of one input in the run's data set, which must be here and unchanged."""
    check_files(folder, "")
    return tuple(prepare(config).task.clients[0].x.shape[1:])


def network_of(config: Config, folder: Path, clients: int, shape: tuple[int, ...] | None) -> Model:
    """The run's network for inputs of this shape; None looks the shape up in the data set."""
    check_files(folder, "" if shape is None else ".py")
    # Preparing the run loads its data set. If the caller gives the shape, no data are needed.
    if shape is None:
        return prepare(config).model
    seed = config.seeds.resolved().init
    encoding = encoding_in(folder)
    layout = None if encoding is None else encoding.layout
    if is_python(config.model.name):
        inputs = shape if layout is None else layout.inputs[0].shape
        task = Shape(inputs, classes_in(folder), () if encoding is None else encoding.outputs)
        return custom_network(config.model.name, task, seed, layout)
    traits, classes = recipes.traits_of(config.method.name), len(classes_in(folder))
    return named_network(config.model, traits, shape, classes, seed, clients, layout)
