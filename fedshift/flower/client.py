"""The client side: an algorithm's `client_update` and evaluation as a Flower ClientApp."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedshift.algorithms.method import Method
from fedshift.arguments import called, check_fields
from fedshift.client.local import plan_all
from fedshift.data import ClientData, Examples, check_client, count, label_counts, of_importance
from fedshift.engine.backends import Reply
from fedshift.engine.checks.gate import Gate
from fedshift.engine.checks.replies import Limits, error_of, fault_in, not_finite
from fedshift.errors import FedshiftError, InputError
from fedshift.flower.calibrating import CALIBRATE, correction_in, sums_for
from fedshift.flower.kept import Kept, folder_of
from fedshift.flower.records import failed, fields_of, parts_of, to_parts, to_record, to_records
from fedshift.flower.routing import MODEL, answers_to
from fedshift.flower.scoring import SCORE, scored, scored_tests
from fedshift.randomness import undrawn
from fedshift.sketch import sketched
from fedshift.tree import Params, Parts, size_in_bytes

LOG = logging.getLogger("fedshift.flower")
STATE, DONE = "state.", "done"
Handler = Callable[[Message, Context], Message]


class Own(NamedTuple):
    """The model that a client serves after round t of a run, and the sizes of its network."""

    name: str
    t: int
    pair: tuple[Params, Params]
    shape: tuple[int, ...]
    classes: int
    clients: int


def log_failure(error: Exception) -> None:
    """Log why there is no answer; unexpected errors with their traceback."""
    LOG.error("no answer: %s", error, exc_info=not isinstance(error, FedshiftError))


Leave = Callable[[Context, Own], None]
Note = Callable[[RecordDict, Context], None]


@sketched
@dataclass(frozen=True, eq=False)
class Site:
    """All that one client needs: the method, its examples, the seed of its batches.

    data        its id is the partition id that Flower gives to the node
    seed        the run's `seeds.batch`, the same on all clients
    validation  examples to score models on, for federated evaluation
    first       the first (parameters, buffers); the network's own if left out
    tests       examples to test the model that the client serves, or None

    Raises InputError for importances that are not one number per example, finite and 0 or more.
    """

    algorithm: Method
    data: ClientData
    seed: int = 0
    validation: Examples | None = None
    first: tuple[Params, Params] | None = field(default=None, repr=False)
    tests: Examples | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_client(self.data, int(self.data.id))
        object.__setattr__(self, "data", of_importance((self.data,))[0])

    @property
    def start(self) -> tuple[Params, Params]:
        """The first model, the same on all clients and the server."""
        return self.algorithm.model.init() if self.first is None else self.first


def partition(context: Context) -> int:
    """The client id of a node. Raises InputError for a node without partition-id."""
    client = context.node_config.get("partition-id")
    if client is None:
        raise InputError(
            "this node has no partition-id; start it with --node-config "
            '"partition-id=0 num-partitions=3"'
        )
    return int(client)


def form_of(params: Params, buffers: Params) -> list[str]:
    """Names, shapes and types of a model's tensors, one line each."""
    return [f"{k} {tuple(v.shape)} {v.dtype}" for k, v in (params | buffers).items()]


def digest_of(params: Params, buffers: Params) -> str:
    """A checksum of a model's numbers."""
    digest = hashlib.blake2b(digest_size=16)
    # Sort, because models do not differ by the order of their dictionaries.
    for name, v in sorted((params | buffers).items()):
        digest.update(name.encode() + v.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def client_app(
    site: Callable[[int], Site],
    *,
    threads: int = 1,
    open_states: bool = False,
    keep: Path | None = None,
) -> ClientApp:
    """A Flower ClientApp that runs an algorithm's client side.

    site         a function from the partition id to this client's `Site`. In a simulation it is
                 pickled with each message, so let it load (and cache) data, not contain them
    threads      torch threads while a message is handled; results depend on them in the last bit
    open_states  send the client's state to the server on request. For simulations and tests, where
                 the server's process owns the clients; never in a deployment
    keep         a folder on the node for the client's state in runs with a name
                 (`AlgorithmStrategy`), so that they can resume after the server was killed. None:
                 the state is lost when Flower's run ends

    If a client fails or its training diverges, its state stays that before the round. Raises
    InputError if `site` is not a function.
    """
    if not callable(site):
        raise InputError(
            f"site is {called(site)}; give a function from the client's number to its Site, as "
            "`lambda i: Site(method, clients[i])`"
        )
    return app_of(lambda context: site(partition(context)), threads, open_states, keep)


def app_of(
    site: Callable[[Context], Site], threads: int, open_states: bool, keep: Path | None,
    private: Callable[[Context], bool] = lambda context: False,
    leave: Leave = lambda context, evaluation: None,
    note: Note = lambda sent, context: None,
    tell: Callable[[Exception], None] = log_failure,
) -> ClientApp:  # fmt: skip
    """`client_app` for sites that also depend on the run's configuration.

    private  whether to withhold the texts of other libraries' errors, which may contain rows or
             paths, from the server
    leave    called with the model that the client serves, each time that it was tested here
    note     called with each message that the client has answered
    tell     called with the error for which there is no answer
    """
    app, visit = ClientApp(), _checked_site(site, threads)
    failing = partial(_with_failures, private, note, tell)

    @app.query("register")
    @failing
    def register(message: Message, context: Context) -> RecordDict:
        return _register(visit(context), message.content)

    @app.train()
    @failing
    def train(message: Message, context: Context) -> RecordDict:
        _check_new(message.content, context)
        kept = _state_place(keep, message.content, context)
        update, state = _train(visit(context), message.content, context, kept)
        _check_size(update, message.content)
        answer = RecordDict({**to_records(update), "run": message.content["run"]})
        # Store the state last, so that a failure before does not change the client.
        _store_state(state, _round(message.content), context, kept)
        return answer

    @app.evaluate()
    @failing
    def evaluate(message: Message, context: Context) -> RecordDict:
        kept = _state_place(keep, message.content, context)
        return _evaluate(visit(context), message.content, context, kept, leave)

    app.query("router")(failing(lambda m, c: _answer_router(visit(c), m.content)))
    app.query(CALIBRATE)(failing(lambda m, c: sums_for(visit(c), m.content)))
    if open_states:
        app.query("state")(failing(_answer_state))
    return app


def _answer_state(message: Message, context: Context) -> RecordDict:
    return RecordDict(dict(to_records(to_parts(context.state.array_records, STATE), STATE)))


def _store_state(state: Parts, t: int, context: Context, disk: Kept | None) -> None:
    """Store the client's state after round t: on disk first, since that may fail."""
    has_state = any(state.values())
    # Most methods have no client state: then write no file.
    if has_state and disk is not None:
        disk.remember(state, t)
    for name, record in to_records(state, STATE).items():
        context.state[name] = record
    # Note the round only with a state: without one, training twice does no harm.
    if has_state:
        context.state[DONE] = ConfigRecord({"round": t})


def _check_new(sent: RecordDict, context: Context) -> None:
    """Raise InputError for a round that was trained before: the state would change twice."""
    t = _round(sent)
    if DONE in context.state and fields_of(context.state, DONE)["round"] == t:
        raise InputError(f"round {t} was trained here before, and its answer was lost")


def _check_size(update: Parts, sent: RecordDict) -> None:
    """Raise InputError for a reply that is too large for the server.

    The server's own refusal would take minutes and give no reason.
    """
    size, most = size_in_bytes(update), fields_of(sent, "run").get("most_bytes")
    if most is not None and size > most:
        raise InputError(
            f"its reply has {size:,} bytes, and the server takes {most:,}; raise training.max_reply"
        )


def _round(sent: RecordDict) -> int:
    return int(fields_of(sent, "run")["round"])


def _checked_site(site: Callable[[Context], Site], threads: int) -> Callable[[Context], Site]:
    """`site`, with a check that the data belong to the node's partition."""

    def visit(context: Context) -> Site:
        # Set for each message, because Ray's actors and SuperNodes start with torch's default.
        torch.set_num_threads(threads)
        checked, client = site(context), partition(context)
        if int(checked.data.id) != client:
            raise InputError(
                f"the node of partition {client} has the data of client {int(checked.data.id)}; "
                "give client_data(x, y, partition)"
            )
        return checked

    return visit


def _with_failures(
    private: Callable[[Context], bool], note: Note, tell: Callable[[Exception], None],
    work: Callable[[Message, Context], RecordDict],
) -> Handler:  # fmt: skip
    """A handler that answers with the reason if `work` fails, in the same words as other engines.

    private, note, tell: as for `app_of`.
    """

    def handle(message: Message, context: Context) -> Message:
        try:
            content = work(message, context)
            note(message.content, context)
        except FedshiftError as e:
            tell(e)
            content = failed(str(e))
        except Exception as e:
            # User code may raise anything. The server gets the reason, the log the traceback.
            tell(e)
            text = "the client's log says more" if private(context) else str(e)
            content = failed(f"{type(e).__name__}: {text}")
        return Message(content, reply_to=message)

    return handle


def _register(site: Site, request: RecordDict) -> RecordDict:
    """The client's id, its row of the columns that the method reads, and its model's form."""
    data, config = site.data, fields_of(request, "ask")
    columns, classes = [str(c) for c in config["columns"]], int(config["classes"])
    client, largest = int(data.id), int(data.y.max()) if len(data.y) else -1
    if largest >= classes:
        raise InputError(
            f"client {client} has label {largest}, and the server expects {classes} classes, "
            f"labels 0..{classes - 1}"
        )
    table = {"n": count(data).double(), "labels": label_counts(data, classes).double()}
    identity = ConfigRecord(
        {"client": client, "form": form_of(*site.start), "digest": digest_of(*site.start)}
    )
    return RecordDict({"who": identity, "table": to_record({k: table[k] for k in columns})})


def _state_place(keep: Path | None, sent: RecordDict, context: Context) -> Kept | None:
    """Where this client's state in the run is stored; None without a folder or a run's name."""
    run = fields_of(sent, "run")
    if keep is None or "name" not in run:
        return None
    folder = folder_of(keep, str(run["name"]))
    return Kept(folder, partition(context), context.run_id, int(run["after"]))


def _state(site: Site, context: Context, disk: Kept | None) -> Parts:
    kept = to_parts(context.state.array_records, STATE)
    # Prefer Flower's own state: it belongs to this run and to the latest round.
    if not kept and disk is not None:
        kept = disk.recall() or {}
    return kept or site.algorithm.init_client(*site.start, site.data)


# The caller may be in inference mode, which takes no gradients.
@torch.inference_mode(False)
def _train(
    site: Site, sent: RecordDict, context: Context, disk: Kept | None
) -> tuple[Parts, Parts]:
    """(update for the server, the client's whole new state)."""
    t, client = _round(sent), int(site.data.id)
    stage, state = site.algorithm.at(t), _state(site, context, disk)
    message, plans = parts_of(sent), plan_all(stage.phases(), site.data, t, site.seed, client)
    with undrawn(site.algorithm.model.net):
        update, changed = stage.client_update(message, state, site.data, plans)
    limits = Limits(t, Gate(), lambda i: message, not_finite(site.start[1]))
    if bad := fault_in(Reply(client, update, changed, t), None, limits):
        raise error_of(bad)
    return update, state | changed


def _evaluate(
    site: Site, sent: RecordDict, context: Context, disk: Kept | None, leave: Leave
) -> RecordDict:
    """Counts on the client's validation examples, for the model sent or for the one it serves.

    The latter is also scored on the client's test examples, if it has some, and passed to `leave`.
    """
    run, examples = fields_of(sent, "run"), site.validation
    t, classes = int(run["round"]), int(run["classes"])
    message, stage = parts_of(sent), site.algorithm.at(t)
    # A client without validation examples answers with counts of 0.
    if examples is None:
        examples = Examples(site.data.x[:0], site.data.y[:0])
    if not run["own"]:
        pair, moved = (message["params"], message["buffers"]), correction_in(sent)
        return RecordDict({SCORE: scored(stage, pair, examples, classes, correction=moved)})
    try:
        pair = stage.model_for(message, _state(site, context, disk))
    except KeyError as e:
        raise InputError(
            f"the model that a client of this method serves needs {e} of the server, which "
            "clients are not sent; let the server evaluate"
        ) from e
    records = {SCORE: scored(stage, pair, examples, classes)}
    if site.tests is not None:
        records |= scored_tests(stage, message, pair, site.tests, classes, run["present"])
        shape, clients = tuple(site.data.x.shape[1:]), len(run["present"])
        leave(context, Own(str(run.get("name", "")), t, pair, shape, classes, clients))
    return RecordDict(dict(records))


@torch.inference_mode(False)
def _answer_router(site: Site, sent: RecordDict) -> RecordDict:
    """Answers for a fit of the router, with the server's model on this client's examples."""
    message, first = to_parts(sent.array_records, MODEL), site.start
    # Tensors that are not shared keep their first values: the router does not depend on them.
    pair = first[0] | message["params"], first[1] | message["buffers"]
    stage = site.algorithm.at(_round(sent))
    return RecordDict({**answers_to(sent, stage, pair, site.data), "run": sent["run"]})
