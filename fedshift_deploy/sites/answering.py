"""A site's answers to the server's questions, where rows stay at their clients.

Before round 1 the server asks the first four questions of `STEPS`. After evaluated rounds it asks
for scores. Each question is one `Section` as JSON, and so is each answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from fedshift.data import ClientData, Examples, Task, client_data
from fedshift.datasets.base import Dataset, Samples
from fedshift.errors import FedshiftError, InputError, shown
from fedshift.experiments.config.data import Data
from fedshift.experiments.config.load import load_config
from fedshift.experiments.config.schema import Config
from fedshift.experiments.config.section import Section
from fedshift.experiments.config.sites import AGREED
from fedshift.experiments.experiment import federation_of, method_of
from fedshift.experiments.task.custom_data import prepare_built
from fedshift.files import write
from fedshift.flower.client import Site, partition
from fedshift.flower.records import failed, fields_of, parts_of
from fedshift.flower.scoring import scored
from fedshift.tasks.building import Built
from fedshift.tasks.encoding import Encoding
from fedshift.tasks.names import Coded, Ints, text_of
from fedshift.tasks.rows import Columns
from fedshift_deploy.notices import tell_here
from fedshift_deploy.sites.rows import SiteError, SiteRows, discreet, rows_of_site
from fedshift_deploy.sites.sums import (
    Cut,
    Mean,
    Taken,
    cut_site,
    squares,
    survey,
    totals,
)

STEPS = ("survey", "totals", "squares", "prepare", "scores")
ASK, ANSWER, EXPERIMENT, PREPARED = "site", "answer", "experiment.toml", "prepared.json"
S = TypeVar("S", bound=Section)


class Setup(Section):
    """What a site needs for the rounds: the encoding (JSON), T [K], and what to hold out."""

    encoding: str
    target: tuple[float, ...]
    taken: Taken


class Common(Section):
    """The third question: the common means, from which training rows deviate; see `squares`."""

    taken: Taken
    means: dict[str, Mean]


class Deviations(Section):
    """The third answer: by column, the sum of squared deviations from the common mean."""

    squares: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class Chosen(Section):
    """The question for scores: which test rows, by their places after sorting them by class."""

    places: tuple[int, ...]


class _Prepared(Section):
    """What a site stores before round 1: the run's id, a checksum of its rows, and the setup."""

    run: int
    digest: str
    setup: Setup


def read(kind: type[S], text: str) -> S:
    """A message from its JSON. Raises InputError, in one line, for text that is no such message."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(
            f"its message of {kind.__name__} is none: {place}: {first['msg']}"
        ) from None


def answer(message: Message, context: Context, config: Config, folder: Path) -> RecordDict:
    """The site's answer to one of STEPS, or why it has none; with the client's number."""
    sender = {"client": partition(context)}
    site = partial(own_site, config, context, folder)
    seed = config.seeds.resolved().split
    try:
        made, scores = _answered(message.content, context, config.data, seed, folder, site)
    except Exception as e:
        tell_here(e)
        # The text of another library's error may contain rows or paths of the site, which the
        # server must not get: it gets the type of the error alone.
        why = str(e) if isinstance(e, FedshiftError) else type(e).__name__
        return RecordDict({**failed(why), ASK: ConfigRecord({**sender})})
    return RecordDict({ASK: ConfigRecord({**sender, ANSWER: made.model_dump_json()}), **scores})


def _answered(
    sent: RecordDict, context: Context, data: Data, seed: int, folder: Path,
    site: Callable[[], tuple[Site, Examples]],
) -> tuple[Section, dict[str, MetricRecord]]:  # fmt: skip
    """(the answer, scores by name); site: gives `own_site`, which only the last question needs."""
    asked, client = fields_of(sent, ASK), partition(context)
    step, given = str(asked["step"]), str(asked["given"])
    rows, classes = _rows(data, folder), len(data.classes or ())
    table = rows.inputs
    if step == "survey":
        return survey(rows, classes), {}
    if step == "totals" and isinstance(table, Columns):
        return totals(table, cut_site(rows.codes, read(Taken, given), seed, client).trains), {}
    if step == "squares" and isinstance(table, Columns):
        common = read(Common, given)
        trains = cut_site(rows.codes, common.taken, seed, client).trains
        return Deviations(squares=squares(table, trains, common.means)), {}
    if step == "prepare":
        setup = read(Setup, given)
        _check_encoding(setup.encoding, data)
        noted = _Prepared(run=context.run_id, digest=_digest(rows), setup=setup)
        write(folder / "kept" / PREPARED, noted.model_dump_json() + "\n")
        return Section(), {}
    if step == "scores":
        places = read(Chosen, given).places
        return Section(), _scores(sent, places, classes, *site())
    raise InputError(f'"{shown(step)}" is no question; these are {", ".join(STEPS)}')


def _scores(
    sent: RecordDict, places: Sequence[int], classes: int, site: Site, tests: Examples
) -> dict[str, MetricRecord]:
    """Counts of what the sent model gets right on validation rows and on the chosen test rows."""
    if any(not 0 <= place < len(tests) for place in places):
        raise InputError(f"places beyond the {len(tests)} test rows of this site")
    chosen, parts = torch.tensor(places, dtype=torch.int64), parts_of(sent)
    rate = partial(scored, site.algorithm, (parts["params"], parts["buffers"]), classes=classes)
    assert site.validation is not None
    examples = Examples(tests.x[chosen], tests.y[chosen])
    return {
        "validation": rate(site.validation),
        "tests": rate(examples, confusion=True),
    }


def own_site(config: Config, context: Context, folder: Path) -> tuple[Site, Examples]:
    """(the client's side of the run, its test rows sorted by class), from the rows of its folder.

    The rows are encoded as the server and all sites agreed before round 1.
    """
    client, rows = partition(context), _rows(config.data, folder)
    try:
        noted = read(_Prepared, (folder / "kept" / PREPARED).read_text(encoding="utf-8"))
    except OSError:
        noted = None
    if noted is None or noted.run != context.run_id:
        raise InputError("this site has no part in this run yet: it was not there at its start")
    if noted.digest != _digest(rows):
        raise InputError("its data are not those with which the run began; start a new run")
    encoding, T = Encoding.from_json(noted.setup.encoding), torch.tensor(noted.setup.target)
    x = encoding.encoded(rows.inputs, np.arange(len(rows.codes)))
    cut = cut_site(rows.codes, noted.setup.taken, config.seeds.resolved().split, client)
    mine = client_data(*_at(x, rows.codes, cut.trains), client)
    names = tuple(config.data.clients or ())
    # Stand-ins for the other clients, a row of zeros each: only their number and shape matter.
    one = np.eye(len(encoding.classes), dtype=np.int64)[0]
    clients = [client_elsewhere(one, x.shape[1:], i) for i in range(len(names))]
    clients[client] = mine
    none = Examples(x[:0], mine.y[:0])
    held_out = [none] * len(names)
    held_out[client] = Examples(*_at(x, rows.codes, cut.validation))
    prepared = prepare_built(
        config, built_of(config.data, encoding, T, clients, held_out, none, [], "", [])
    )
    algorithm = method_of(config.method, config.training, prepared)(**config.method.options)
    federation = federation_of(config.method, prepared)
    tests = Examples(*_at(x, rows.codes, _by_class(rows, cut)))
    site = Site(
        algorithm,
        federation.clients[client],
        federation.seeds.batch,
        held_out[client],
        (federation.params, federation.buffers),
        tests if config.data.target == "clients" else None,
    )
    return site, tests


def _at(x: Tensor, codes: Ints, rows: Ints) -> tuple[Tensor, Tensor]:
    return x[torch.from_numpy(rows)], torch.from_numpy(codes[rows])


def _by_class(rows: SiteRows, cut: Cut) -> Ints:
    return cut.tests[np.argsort(rows.codes[cut.tests], kind="stable")]


def stand_in(counts: Ints, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(x [n, *shape] of zeros, labels y [n] with these counts [K]); x takes almost no memory."""
    y = torch.arange(len(counts)).repeat_interleave(torch.from_numpy(counts))
    return torch.zeros(1, *shape).expand(len(y), *shape), y


def client_elsewhere(counts: Ints, shape: Sequence[int], client: int) -> ClientData:
    """A client whose rows are on another machine: zeros, under the real label counts."""
    x, y = stand_in(counts, shape)
    return ClientData(x, y, torch.ones(len(y)), torch.tensor(client))


def built_of(
    declared: Data, encoding: Encoding, T: Tensor, clients: Sequence[ClientData],
    validation: Sequence[Examples], test: Examples, tests: Sequence[Examples], digest: str,
    notes: Sequence[str],
) -> Built:  # fmt: skip
    """A task whose examples may be on other machines, in the form that `Task.build` gives."""
    y = torch.cat([*(c.y for c in clients), *(v.y for v in validation)])
    x = clients[0].x[:1].expand(len(y), *clients[0].x.shape[1:])
    samples = (Samples(x, y), Samples(x[:1].expand(len(test), *x.shape[1:]), test.y))
    data = Dataset(declared.name, *samples, encoding.classes, digest, "yours", "yours")
    task = Task(
        tuple(clients),
        tuple(validation),
        T,
        test,
        target_validation=None,
        classes=encoding.classes,
        tests=tuple(tests),
    )
    names = tuple(declared.clients or ())
    pool = np.arange(sum(len(c.y) for c in clients))
    return Built(task, encoding, data, pool, digest, tuple(notes), names, "the sites' target")


def agreed(data: Data) -> dict[str, object]:
    """The declarations of [data] that server and sites must have in common."""
    return {key: getattr(data, key) for key in AGREED}


def _rows(data: Data, folder: Path) -> SiteRows:
    """The site's rows, after a check that the server's experiment declares the same data.

    Its copy in this folder, experiment.toml, is what the site's operator has agreed to. Raises
    SiteError, whose detail is for the client's own log and screen.
    """
    with discreet("its experiment.toml cannot be read"):
        here = load_config(folder / EXPERIMENT).data
    theirs, ours = agreed(data), agreed(here)
    if odd := [key for key in AGREED if theirs[key] != ours[key]]:
        raise SiteError(
            f"its experiment.toml has another data.{odd[0]} than the server's experiment",
            f"the server's experiment has another data.{odd[0]} than {folder / EXPERIMENT}; have "
            "the server's operator send the new file",
        )
    try:
        return rows_of_site(folder, data)
    except SiteError as e:
        cure = f"mend it, and try it with `fedshift deploy check {folder}`"
        raise SiteError(str(e), f"{e.detail.rstrip('.')}; {cure}") from None


def _check_encoding(text: str, data: Data) -> None:
    try:
        encoding = Encoding.from_json(text)
    except ValueError as e:
        raise InputError(f"the server's encoding is none: {e}") from None
    if encoding.classes != tuple(map(text_of, data.classes or ())) or not {
        column.name for column in encoding.columns
    } <= {*(data.columns or ())}:
        raise InputError("the server's encoding has other columns or classes than its experiment")


def _digest(rows: SiteRows) -> str:
    """A checksum of the rows: if a file changed during a run, two data sets would be mixed."""
    digest = hashlib.sha256(rows.codes.tobytes())
    for values in rows.inputs.of.values():
        if isinstance(values, Coded):
            digest.update(values.codes.tobytes() + "\n".join(values.names).encode())
        else:
            digest.update(np.ascontiguousarray(np.asarray(values)).tobytes())
    return digest.hexdigest()
