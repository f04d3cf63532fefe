"""The server side: an algorithm's weights and `server_update` as a Flower Strategy."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedshift.algorithms.method import Method, check_method
from fedshift.arguments import Positive, check_fields, check_whole
from fedshift.engine.checks.gate import Dropped, Gate
from fedshift.engine.checks.replies import not_finite
from fedshift.engine.checks.reply_bytes import check_room, most_bytes
from fedshift.engine.preflight.method import check_company, check_training, check_whole_models
from fedshift.engine.round import (
    Opened,
    Round,
    admit,
    close_round,
    count_skips,
    open_round,
    weigh,
)
from fedshift.engine.run import check_size, draw_cohort
from fedshift.engine.traffic import Traffic
from fedshift.errors import InputError
from fedshift.evaluation.scores import OwnScores, Score
from fedshift.flower.arriving import Arrived, arrived, failed_client
from fedshift.flower.late import adopt, check_can_wait
from fedshift.flower.nodes import (
    Expected,
    Met,
    check_min_clients,
    columns_read,
    join,
    meet,
    names_of,
    tell_refused,
)
from fedshift.flower.records import (
    to_record,
    to_records,
    to_shared_records,
)
from fedshift.flower.routing import MODEL
from fedshift.flower.scoring import scores_of
from fedshift.flower.waiting import Tell
from fedshift.seeds import Seeds
from fedshift.tree import Params, Parts, size_in_bytes

LOG = logging.getLogger("fedshift.flower")
# Seconds for the registration of clients that join late; a round waits for it.
LATE = 60.0
GONE, NOT_YET = "its node is not connected", "it has not joined yet"
ON_SERVER = 'score it on the server, without evaluates, or take mode = "public"'


def ignore(*heard: object) -> None:
    """A listener that does nothing."""


def never(t: int) -> bool:
    """No round."""
    return False


@dataclass(eq=False)
class AlgorithmStrategy(Strategy):
    """Any algorithm of the library as a Flower strategy, with the same results as the engine's.

    clients   N; clients are the partition ids 0..N-1
    classes   K
    seeds     seeds of cohorts and batches; clients must have the same `seeds.batch`
    cohort    clients drawn per round; None means all
    first     the first (parameters, buffers); the network's own if left out
    patience  seconds to wait for all nodes before round 1
    min_clients  how many are enough after `patience`; all by default. Others may join later
    timeout   seconds that a client has for one round; later answers are not used
    own       federated evaluation scores the models that clients serve, not the server's
    retries   how often a client that reports a failure is asked again, while there is time (by
              `play`; Flower's own `start` asks once)
    gate      limits of what is accepted; with `on_bad` "drop", rounds without enough usable answers
              are skipped
    listen    called with each round that was played
    registers called with the table of all clients, n [N] and the other columns that the method
              reads, before round 1, and again when clients have joined late
    dropping  called with the round and a client that drops out of it, as soon as that is clear
    tell      called with events: clients that are missing before round 1, join later or are then
              refused, or give no scores
    places    nodes have the names client-0, client-1, ... with which their keys were registered:
              each may only be the client of its name
    scoring   called with each client's scores; raises InputError for those that it cannot have
    after     the state after the last round of an interrupted run, to resume it. Clients lose their
              states with a run of Flower, unless they have a folder for them
    name      of the run, 32 digits and letters a-f, the same when it resumes: clients find their
              states by it. Without a name they store nothing on disk

    Before round 1 the server asks every node for its partition and for what the method registers.
    A client that is absent, fails, answers too late, or sends an unusable reply drops out of the
    round: weights are solved again over the clients present. Raises InputError for a federation
    that is not as expected (`nodes.meet`) and TrainingError for a round that cannot be settled.
    `current` is the state after the last round, `traffic` the bytes of its tensors.
    """

    algorithm: Method
    _: KW_ONLY
    clients: int
    classes: int
    seeds: Seeds = Seeds()
    cohort: int | None = None
    first: tuple[Params, Params] | None = None
    patience: float = 600.0
    timeout: Positive = 3600.0
    own: bool = False  # users write this name (docs/flower.md)
    evaluates: Callable[[int], bool] = never
    listen: Callable[[Round], None] = ignore
    registers: Callable[[Params], None] = ignore
    gate: Gate = Gate()
    retries: int = 0
    after: Round | None = None
    name: str = ""
    min_clients: int | None = None
    dropping: Callable[[int, Dropped], None] = ignore
    scoring: Callable[[int, Score, OwnScores | None], None] = ignore
    places: bool = False
    tell: Tell = ignore

    def __post_init__(self) -> None:
        check_method(self.algorithm)
        check_fields(self)
        check_whole("retries", self.retries, 0)
        check_min_clients(self.min_clients, self.clients)
        self.size = self.clients if self.cohort is None else self.cohort
        check_size(self.clients, self.size)
        first = self.algorithm.model.init() if self.first is None else self.first
        self.params, self.buffers = first
        check_training(self.algorithm, self.params, 1)
        scored = self.evaluates is not never and not self.own
        check_whole_models(self.algorithm, ON_SERVER, sent=scored)
        check_company(self.algorithm, self.clients, self.size)
        check_room(self.algorithm, self.params, self.buffers, self.gate)
        self.met, self.current = Met({}, {}, ()), self.after
        self.opened: Opened | None = None
        self.took_part = set(self.after.states if self.after else ())
        # The run's name and last valid round, by which clients check the states that they stored.
        after = 0 if self.after is None else self.after.t
        self.run_fields: dict[str, str | int]
        self.run_fields = {"name": self.name, "after": after} if self.name else {}
        self.lost, self.sent_messages = list[Dropped](), list[tuple[int, Metadata]]()
        self.reported, self.sent, self.traffic = set[int](), dict[int, int](), Traffic()
        self.scores, self.tests = dict[int, Score](), dict[int, OwnScores]()

    @torch.inference_mode(False)
    def begin(self, grid: Grid) -> Round:
        """Register the clients, unless that is done, and set up the server's state."""
        # Called in each round: later calls only register clients that have joined since.
        if self.current is not None and self.met.nodes:
            if len(self.met.nodes) < self.clients:
                self._take_late(grid, self.current)
            return self.current
        self.met = meet(
            grid, self._expected(), patience=self.patience, min_clients=self.min_clients,
            tell=self.tell,
        )  # fmt: skip
        if absent := [i for i in range(self.clients) if i not in self.met.nodes]:
            LOG.warning("clients %s have not joined; their counts are not known yet", absent)
            check_can_wait(self.algorithm, absent)
        self.current = adopt(self.algorithm, self.params, self.buffers, self.current, self.met)
        self._report_registered(())
        return self.current

    def _report_registered(self, before: Sequence[int]) -> None:
        """Report what clients registered; before: strangers that were reported already."""
        if new := [i for i in self.met.strangers if i not in before]:
            LOG.warning(
                "clients %s start from a first model with other numbers than the server's; "
                "what they keep for themselves differs from a run in one process",
                new,
            )
        self.registers(dict(self.met.table))

    def _expected(self) -> Expected:
        first, numbers = (self.params, self.buffers), (self.clients, self.classes)
        columns = columns_read(self.algorithm, *first, *numbers)
        return Expected(*numbers, columns, *first, self.places)

    def _take_late(self, grid: Grid, current: Round) -> None:
        """Register clients that have connected since; refuse them if the method cannot add them."""
        before, patience = self.met, min(self.patience, self.timeout, LATE)
        self.met = join(grid, self._expected(), before, patience, self.tell)
        try:
            self.current = adopt(self.algorithm, self.params, self.buffers, current, self.met)
        except InputError as e:  # go on without them
            new = set(self.met.nodes.values()) - set(before.nodes.values())
            tell_refused(dict.fromkeys(sorted(new), str(e)), names_of(grid), self.tell)
            self.met = replace(before, refused=self.met.refused | new)
        for i in sorted(self.met.nodes.keys() - before.nodes.keys()):
            self.tell({"event": "joined", "round": current.t + 1, "client": i})
        if self.met.nodes != before.nodes:
            self._report_registered(before.strangers)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message to each client of the round's cohort that has to train."""
        current, t = self.begin(grid), server_round
        self.opened = self._open(current, t, set(grid.get_node_ids()))
        self.reported, self.sent_messages = set(), []
        self._report_drops(t, self.lost)
        messages = {i: self.opened.message(i) for i in self.opened.clients()}
        self.sent = {i: size_in_bytes(message) for i, message in messages.items()}
        # Clients refuse to send a reply that the server would refuse to read.
        run = {"round": t, "most_bytes": self._most(messages.values())}
        return [
            self._message("train", i, records, run)
            for i, records in to_shared_records(messages).items()
        ]

    @torch.inference_mode(False)
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the usable replies; clients without one are dropped from the round."""
        opened, current = self.opened, self.current
        if opened is None or current is None:
            raise InputError("aggregate_train before configure_train: no round is open")
        received = self.read(replies, self._most(map(opened.message, opened.clients())))
        good, bad = admit(received.replies, opened, self.gate, not_finite(self.buffers))
        unread = {one.client: one for one in received.unread}
        lost = [*self.lost, *(unread.get(one.client, one) for one in bad)]
        up = sum(size_in_bytes(reply.update) for reply in good)
        # Count only clients that answered: traffic is reported as a mean over them.
        self.traffic = Traffic(len(good), sum(self.sent[reply.client] for reply in good), up)
        table, seed = dict(self.met.table), self.seeds.batch
        played = close_round(opened, current.server, good, lost, self.gate, table, seed)
        # Report before counting skips, which may end the run with an error.
        self._report_drops(played.t, played.dropped)
        self.listen(played)
        self.current = count_skips(played, current, self.gate)
        self.took_part |= set(played.trained)
        counts = {"clients": len(played.trained)}
        loss = {} if math.isnan(played.loss) else {"train_loss": played.loss}
        return self._arrays(played.server), MetricRecord({**loss, **counts})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """In rounds for which `evaluates` is true, ask every connected client for its scores."""
        self.scores, self.tests = {}, {}
        if self.current is None or not self.evaluates(server_round):
            return []
        return self.questions(self.current, grid)

    def questions(
        self, played: Round, grid: Grid, beside: Mapping[str, ArrayRecord] = {},
    ) -> list[Message]:  # fmt: skip
        """Messages that ask clients for scores of a round's model, or of the models they serve."""
        self.scores, self.tests, self.sent_messages = {}, {}, []
        if not self.own:
            check_whole_models(self.algorithm, ON_SERVER)
        stage, server = self.algorithm.at(played.t), played.server
        # Not a cohort: all connected clients evaluate.
        everyone = torch.arange(self.clients)
        weights = weigh(stage, server, everyone, self.gate.max_weight)
        context = server | {"cohort": {"id": everyone, "weight": weights}}
        shared = {"params": server.get("params", {}), "buffers": server.get("buffers", {})}
        run: dict[str, int | list[int]] = {
            "round": played.t, "own": self.own, "classes": self.classes, "present": self.present,
        }  # fmt: skip
        absent = self._absent(range(self.clients), set(grid.get_node_ids()))
        self._report_missing_scores(played.t, absent)
        asked = sorted({*range(self.clients)} - {one.client for one in absent})
        messages = {i: shared | stage.broadcast(context, i) if self.own else shared for i in asked}
        return [
            self._message("evaluate", i, {**records, **beside}, run)
            for i, records in to_shared_records(messages).items()
        ]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Store each client's counts in `scores`; return accuracy and loss over all clients."""
        late = f"no answer within {self.timeout:g} s"
        missed = {client: Dropped(client, late, "timeout") for client, _ in self.sent_messages}
        read = scores_of(replies, self._client, self.classes, self.clients, self.scoring)
        self.scores |= read.scores
        self.tests |= read.tests
        missed = {i: one for i, one in missed.items() if i not in read.scores} | read.bad
        self._report_missing_scores(server_round, missed.values())
        if not self.scores:
            return None
        # Add in the order of ids, because the last bit of a sum depends on the order.
        first, *others = (self.scores[i] for i in sorted(self.scores))
        pooled = sum(others, start=first)
        metrics = {"accuracy": pooled.accuracy, "loss": pooled.loss, "n": pooled.n}
        return MetricRecord({k: v for k, v in metrics.items() if not math.isnan(v)})

    def _report_missing_scores(self, t: int, missed: Iterable[Dropped]) -> None:
        """Report clients whose scores after round t are missing, and why."""
        for one in missed:
            LOG.warning("no score of client %d: %s", one.client, one.reason)
            self.tell({"event": "unscored", "round": t, **one._asdict()})

    def _absent(self, clients: Iterable[int], connected: Collection[int]) -> list[Dropped]:
        """The clients that are not connected, with the reason."""
        return [
            Dropped(i, NOT_YET if self._node(i) < 0 else GONE, "lost")
            for i in clients if self._node(i) not in connected
        ]  # fmt: skip

    def summary(self) -> None:
        """Log the method and the numbers of clients."""
        LOG.info(
            "%s, %d clients, %d per round", type(self.algorithm).__name__, self.clients, self.size
        )

    def _node(self, client: int) -> int:
        return self.met.nodes.get(client, -1)

    def _client(self, reply: Message) -> int | None:
        by_node = {node: client for client, node in self.met.nodes.items()}
        if reply.has_error() and reply.metadata.src_node_id not in by_node:
            # The SuperLink answers for a node that is gone: find the client by the message that it
            # was sent. (Ids are only known now, as messages get theirs when they are sent.)
            by_message = {sent.message_id: client for client, sent in self.sent_messages}
            return by_message.get(reply.metadata.reply_to_message_id)
        return by_node.get(reply.metadata.src_node_id)

    @property
    def present(self) -> list[int]:
        """[N]: 1 for clients with examples that have trained in some round, else 0."""
        n = self.met.table.get("n")
        return [int(i in self.took_part and (n is None or n[i] > 0)) for i in range(self.clients)]

    def ask_for_sums(
        self, kind: str, records: Mapping[str, ArrayRecord | ConfigRecord], ids: Iterable[int],
        played: Round,
    ) -> dict[int, Message]:  # fmt: skip
        """Messages that ask these clients for sums with a round's model; see `routing`."""
        check_whole_models(self.algorithm, ON_SERVER)
        shared = {name: played.server.get(name, {}) for name in ("params", "buffers")}
        asked, run = {**to_records(shared, MODEL), **records}, {"round": played.t}
        return {i: self._message(f"query.{kind}", i, asked, run) for i in ids}

    def read(self, replies: Iterable[Message], most: int | None = None) -> Arrived:
        """The replies that can be read, of at most `most` bytes and at most the gate's limit."""
        limit = self.gate.max_bytes if most is None else min(most, self.gate.max_bytes)
        return arrived(replies, self._client, limit)

    def _message(
        self, kind: str, client: int, records: Mapping[str, ArrayRecord | ConfigRecord],
        run: Mapping[str, int | list[int]],
    ) -> Message:  # fmt: skip
        """One message to a client, with the fields of the run; its metadata are stored."""
        content = RecordDict({**records, "run": ConfigRecord({**run, **self.run_fields})})
        node, life = self._node(client), self.timeout
        message = Message(content, message_type=kind, dst_node_id=node, ttl=life)
        self.sent_messages.append((client, message.metadata))
        return message

    def _most(self, messages: Iterable[Parts]) -> int:
        """The bytes that a reply to these messages may have."""
        return most_bytes(self.gate.max_reply, self.params, self.buffers, messages)

    def _open(self, current: Round, t: int, connected: Collection[int]) -> Opened:
        """Open the round for connected clients; contact none if no weights exist for them."""
        drawn = draw_cohort(self.clients, self.size, t, self.seeds.cohort)
        opening = partial(open_round, self.algorithm, current.server, t=t, cap=self.gate.max_weight)
        # Absent clients are left out before weights are solved, so that others share all weight.
        self.lost = self._absent(drawn.tolist(), connected)
        present = [i for i in drawn.tolist() if i not in {one.client for one in self.lost}]
        try:
            if present:
                return opening(torch.tensor(present))
        except InputError as e:
            if not self.lost:
                raise
            why = f"not asked: there are no weights over those connected: {e}"
            self.lost += [Dropped(i, why, "lost") for i in present]
        # Open it without asking anyone: the usual code then closes the round (skips or refuses it).
        opened = opening(drawn)
        return opened._replace(asked=torch.zeros_like(opened.asked))

    def hear(self, message: Message) -> None:
        """Report a client that has failed in this round at once, while others are still working."""
        client = self._client(message)
        # With retries it is asked again, so that only the end of the round decides.
        if self.opened is None or self.retries or client is None:
            return
        if message.metadata.message_type == "train" and (bad := failed_client(client, message)):
            self._report_drops(self.opened.t, [bad])

    def _report_drops(self, t: int, lost: Iterable[Dropped]) -> None:
        """Report clients that drop out of round t, each once."""
        for one in lost:
            if one.client not in self.reported:
                self.reported.add(one.client)
                LOG.warning("round %d: client %d dropped out: %s", t, one.client, one.reason)
                self.dropping(t, one)

    def _arrays(self, server: Parts) -> ArrayRecord:
        return to_record(server.get("params", {}) | server.get("buffers", {}))
