"""The models that a run served: how its folder stores them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
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
from fedshift.experiments.folder.corrected_parts import Applied, correction_in
from fedshift.experiments.folder.stored import misfit, read_parts
from fedshift.experiments.task.first_model import named_network
from fedshift.experiments.task.preparing import prepare
from fedshift.files import is_file, read_object
from fedshift.model import Model
from fedshift.record.folder import CLIENTS, CONFIG, ENCODING, MODEL, SUMMARY
from fedshift.record.summary import first_error
from fedshift.tasks.encoding import Encoding
from fedshift.tree import Params, Parts

Pair = tuple[Params, Params]
# The first model, which clients that never took part serve, and the ids of those that did.
FIRST, FIRST_BUFFERS, WHO = "first", "first_buffers", "clients"
# Among the latter, where the clients' models are no part of the file.
ON_SITES = "on_sites"


@dataclass(frozen=True, eq=False)
class RunModels:
    """The models of a run's last round.

    model      the network
    shared     (parameters, buffers) of the server; what every client keeps to itself is not in them
    served     (parameters, buffers) that each client serves, by id; () for a run that was tested on
               the server's model alone
    took_part  ids of the clients that were drawn; the others serve what they began with
    on_sites   whether each client's model stayed at its site; `served` is () then
    corrected  what was done to `shared` for the target (`training.prior`); None for nothing
    """

    model: Model
    shared: Pair = field(repr=False)
    served: tuple[Pair, ...] = field(repr=False)
    took_part: tuple[int, ...]
    on_sites: bool = False
    corrected: Applied | None = field(default=None, repr=False)

    @property
    def uncorrected(self) -> Pair:
        """The server's model as it was trained."""
        before = self.corrected.before if self.corrected else {}
        return self.shared[0] | before, self.shared[1]

    @property
    def personal(self) -> bool:
        """Whether some client serves another model than the server's."""
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

    shape: of one input, as (1, 28, 28); left out, it is looked up in the run's data set, which must
    be there then. model: the network, where a program gave it. Inputs go through what the run's
    went through (`Prepared.task` has them).

    Raises InputError for a folder that is none or not complete, or of a version that did not keep
    all of them, and DataError for files that are missing or damaged.
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
            "fedshift.experiments.folder.stored.read_parts"
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


def model_parts(
    shared: Pair, first: Pair, served: Sequence[Pair], took_part: Iterable[int]
) -> Parts:
    """The parts of model.safetensors: the server's model, and of each client what is its own.

    `served` [M] are the clients' models, () where only the server's is served. A tensor that is the
    server's, or the first model's on a client that never took part, is written once. What counts is
    its bits: which tensors clients share in memory is another matter in workers and after --resume.
    """
    parts: Parts = {"params": shared[0], "buffers": shared[1]}
    if not served:
        return parts
    drawn = set(took_part)
    idle = [served[i] for i in range(len(served)) if i not in drawn]
    # The first model's tensors are stored only where an idle client still serves them.
    begun = tuple(
        {
            k: v for k, v in tree.items()
            if not same_bits(shared[j].get(k), v)
            and any(same_bits(pair[j].get(k), v) for pair in idle)
        }
        for j, tree in enumerate(first)
    )  # fmt: skip
    for i, pair in enumerate(served):
        sent = shared if i in drawn else tuple(a | b for a, b in zip(shared, begun, strict=True))
        changed = [
            {k: v for k, v in tree.items() if not same_bits(sent[j].get(k), v)}
            for j, tree in enumerate(pair)
        ]
        # A complete model ("personal"), or the parts that complete the server's ("private").
        kind = "personal" if changed[0].keys() == pair[0].keys() else "private"
        parts[f"client{i}.{kind}"], parts[f"client{i}.{kind}_buffers"] = changed
    # int64, because the reader takes no other whole numbers (`stored.read_parts`).
    member = torch.tensor([i in drawn for i in range(len(served))]).long()
    return parts | {FIRST: begun[0], FIRST_BUFFERS: begun[1], WHO: {"took_part": member}}


def parts_without_clients(
    shared: Pair, first: Pair, took_part: Iterable[int], clients: int
) -> Parts:
    """`model_parts` where each client's model stayed at its site.

    Of the first model there is what the server's lacks: with it the network is complete, and what
    the server's model alone decides (a router) can be computed.
    """
    lacking = [
        {k: v for k, v in tree.items() if k not in shared[j]} for j, tree in enumerate(first)
    ]
    drawn = set(took_part)
    member = torch.tensor([i in drawn for i in range(clients)]).long()
    who = {"took_part": member, ON_SITES: torch.ones((), dtype=torch.int64)}
    return {
        "params": shared[0], "buffers": shared[1], FIRST: lacking[0], FIRST_BUFFERS: lacking[1],
        WHO: who,
    }  # fmt: skip


def same_bits(a: Tensor | None, b: Tensor) -> bool:
    """Whether both have the same type, shape and bits; the sign of zeros counts."""
    # Clients share most tensors: the same object needs no comparison.
    if a is None or a is b:
        return a is b
    alike = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    return alike and torch.equal(bits(a), bits(b))


def bits(v: Tensor) -> Tensor:
    """Its bytes, in a row."""
    return v.detach().contiguous().flatten().view(torch.uint8)


def took_part(parts: Mapping[str, Params], clients: int, path: Path) -> tuple[int, ...]:
    """Ids of the clients that were drawn. Raises DataError where the file has other clients."""
    member = parts[WHO].get("took_part")
    if member is None or member.shape != (clients,):
        raise DataError(f"{path}: damaged (it does not say which of {clients} clients took part)")
    return tuple(member.nonzero().flatten().tolist())


def served_in(parts: Mapping[str, Params], client: int, drawn: bool) -> Pair:
    """The inverse of `model_parts` for one client; drawn: whether it took part."""

    def whole(shared: str, begun: str, suffix: str) -> Params:
        first = {} if drawn else parts.get(begun, {})
        pair = (parts.get(f"client{client}.{kind}{suffix}", {}) for kind in ("private", "personal"))
        private, personal = pair
        return parts[shared] | first | private | personal

    return whole("params", FIRST, ""), whole("buffers", FIRST_BUFFERS, "_buffers")


def complete(parts: Mapping[str, Params]) -> Pair:
    """The server's model, completed by the first one's tensors where it lacks some."""
    return (
        parts.get(FIRST, {}) | parts["params"],
        parts.get(FIRST_BUFFERS, {}) | parts["buffers"],
    )


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
    """How a run's rows were encoded; None for a run on a set of the library.

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
    """The shape of one input in the run's data set, which must be there as it was."""
    check_files(folder, "")
    return tuple(prepare(config).task.clients[0].x.shape[1:])


def network_of(config: Config, folder: Path, clients: int, shape: tuple[int, ...] | None) -> Model:
    """The run's network; for inputs of this shape, or of those of its data set."""
    check_files(folder, "" if shape is None else ".py")
    # The data set tells the shape; it need not be there if the caller knows it.
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


def check_fit(path: Path, model: Model, many: Iterable[Iterable[Params]]) -> None:
    """Each of these must be this network's trees, in names and shapes. Raises DataError."""
    for trees in many:
        if odd := misfit(trees, model):
            raise DataError(f"{path}: {odd}; give the shape of one input as in training")
