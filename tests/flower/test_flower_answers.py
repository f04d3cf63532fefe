"""Invalid answers of clients, when they register and when they score a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import recipes
from fedshift.data import Examples
from fedshift.engine.checks.gate import Gate
from fedshift.engine.run import Federation
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from support.federations import SIZES, make_federation

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedshift.flower import AlgorithmStrategy, LocalGrid, client_app, play
from fedshift.flower.arriving import arrived
from fedshift.flower.records import failure_of, to_record
from fedshift.flower.rounds import answered
from fedshift_deploy.machines import deployed
from support.flower_runs import sites, strategy_of


@pytest.fixture
def federation(mlp: Model) -> Federation:
    return make_federation(mlp)


def _npy(shape: str) -> bytes:
    """Eight bytes of numbers under a header with this shape."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)


class Answering(LocalGrid):
    """A grid on which client 2's answers of one kind are changed."""

    kind, change = "", staticmethod(lambda content: None)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        for reply in super().send_and_receive(messages, timeout=timeout):
            if (reply.metadata.message_type, reply.metadata.src_node_id) == (self.kind, 1014):
                self.change(reply.content)
            yield reply


def without(*names: str) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        for name in names:
            del content[name]

    return change


def saying(name: str, **fields: Any) -> Callable[[RecordDict], None]:
    return lambda content: content[name].update(fields)


def with_bytes(data: bytes) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content["table"]["n"] = Array("float64", (), "numpy.ndarray", data)

    return change


REGISTERED = {
    "nothing": (without("who", "table"), 'a message without "who": is the other side a fedshift'),
    "no table": (without("table"), "its answer cannot be read: KeyError: 'table'"),
    "a word for a number": (saying("who", client="two"), "its answer cannot be read: ValueError: "),
    "no bytes": (with_bytes(b""), "an array that is not NumPy's"),
    "a header of terabytes": (
        with_bytes(_npy("(1099511627776,)")),
        "an array of float64 (1099511627776,) in 8 bytes",
    ),
    "a failure without a reason": (
        lambda content: content.update({"failure": ConfigRecord({"code": 7})}),
        "it did not say why",
    ),
}


@pytest.mark.parametrize("case", [pytest.param(v, id=k) for k, v in REGISTERED.items()])
def test_registrations_that_cannot_be_read(
    case: tuple[Any, str], setting: Setting, federation: Federation
) -> None:
    """Whatever arrives, there is one message, which names the node."""
    algorithm = recipes.fedavg(setting)
    grid = Answering(client_app(sites(algorithm, federation)), len(SIZES))
    grid.kind, grid.change = "query.register", case[0]
    with pytest.raises(InputError) as error:
        strategy_of(algorithm, federation).begin(grid)
    assert str(error.value).startswith(f"node 1014 cannot take part: {case[1]}")


ODD = [float("inf"), float("nan"), -1]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "value"),
    [*(("correct", v) for v in (*ODD, 10**6)), *(("loss_sum", v) for v in ODD)],
)
def test_scores_that_are_none(
    name: str, value: float, setting: Setting, federation: Federation
) -> None:
    """The others' count."""
    algorithm = recipes.fedavg(setting)
    good = sites(algorithm, federation)

    def site(i: int) -> Any:
        return replace(good(i), validation=Examples(good(i).data.x, good(i).data.y))

    grid = Answering(client_app(site), len(SIZES))
    grid.kind = "evaluate"
    grid.change = saying("score", **{name: [value] * 5 if name == "correct" else value})
    strategy = strategy_of(algorithm, federation, evaluates=lambda t: True)
    list(play(strategy, grid, 1))
    assert sorted(strategy.scores) == [0, 1, 3, 4, 5]


def test_disconnected_clients_are_asked_for_no_score(
    setting: Setting, federation: Federation
) -> None:
    """Answers after the time limit are not used."""
    algorithm = recipes.fedavg(setting)
    strategy = strategy_of(algorithm, federation, evaluates=lambda t: True, timeout=77.0)
    grid = LocalGrid(client_app(sites(algorithm, federation)), len(SIZES))
    sent = list(strategy.configure_train(1, to_record({}), ConfigRecord(), grid))
    replies = list(grid.send_and_receive(sent))
    assert arrived(replies, lambda message: None, 1 << 20) == ([], [])  # of unknown nodes
    strategy.aggregate_train(1, replies)
    grid.absent = {1000, 1035}
    sent += strategy.configure_evaluate(1, to_record({}), ConfigRecord(), grid)
    assert {one.metadata.dst_node_id for one in sent[6:]} == {1007, 1014, 1021, 1028}
    assert {one.metadata.ttl for one in sent} == {77.0}


ROWS = [
    ("n", np.array(99.0), "client 2 registered 16 labels for 99 examples"),
    ("n", np.array(-1.0), 'client 2 registered with "n" = -1.0: no counts'),
    ("n", np.array(0.5), 'client 2 registered with "n" = 0.5: no counts'),
    ("n", np.array(np.inf), 'client 2 registered with "n" = inf: no counts'),
    ("n", np.array(1e13), 'client 2 registered with "n" = 10000000000000.0: no counts'),
    ("labels", np.full(5, np.nan), 'client 2 registered with "labels" = [nan, nan'),
    ("labels", np.ones(4), 'client 2 registered with a misshapen "labels"'),
]


@pytest.mark.parametrize(("name", "row", "message"), ROWS)
def test_rows_that_are_no_counts(
    name: str, row: Any, message: str, setting: Setting, federation: Federation
) -> None:
    algorithm = recipes.fedpals(setting, ess=0.9)
    grid = Answering(client_app(sites(algorithm, federation)), len(SIZES))
    grid.kind = "query.register"
    grid.change = lambda content: content["table"].update({name: Array(row)})
    with pytest.raises(InputError) as error:
        strategy_of(algorithm, federation).begin(grid)
    assert str(error.value).startswith(message)


class Swelling(LocalGrid):
    """A grid on which client 2's updates are larger by some bytes."""

    more = 0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        for reply in super().send_and_receive(messages, timeout=timeout):
            kind, node = reply.metadata.message_type, reply.metadata.src_node_id
            if kind == "train" and node == 1014 and self.more:
                more = np.zeros(self.more, np.uint8)
                reply.content["more"] = ArrayRecord({"zeros": Array(more)})
            yield reply


def test_replies_are_bounded_by_the_model(setting: Setting, federation: Federation) -> None:
    """Larger replies are not decoded; the limit is a multiple of the model's size, plus 1 MiB."""
    algorithm = recipes.fedavg(setting)
    size = sum(v.nbytes for v in (federation.params | federation.buffers).values())

    def reason(more: int, times: float) -> str:
        grid = Swelling(client_app(sites(algorithm, federation)), len(SIZES))
        grid.more = more
        strategy = strategy_of(algorithm, federation, gate=Gate(max_reply=times))
        (played,) = play(strategy, grid, 1)
        assert [client for client, *_ in played.dropped] == [2]
        return played.dropped[0].reason

    limit = (1 << 20) + 8 * size
    assert re.fullmatch(rf"\d+ arrays of \d+ bytes; allowed: 100000 and {limit}", reason(limit, 8))
    # Control: with a larger factor it is decoded, and refused for what it is.
    assert "different" in reason(limit, 10_000) or "non-finite" in reason(limit, 10_000)
    with pytest.raises(InputError, match="max_reply must be more than 0"):
        Gate(max_reply=0.0)


def test_statistics_that_no_reply_may_have_are_refused_before_round_1() -> None:
    """CCVR's, of 400 features: in the last round all replies would be refused."""
    torch.manual_seed(0)
    model = Model(Mlp((4,), (400,), 3))
    method = recipes.ccvr(Setting(model, target=(1 / 3,) * 3, rounds=2))

    def begun(gate: Gate) -> AlgorithmStrategy:
        return AlgorithmStrategy(method, clients=3, classes=3, gate=gate)

    message = r"have 3,849,624 bytes, and the server takes \d.*; give training.max_reply = \d+, or"
    with pytest.raises(InputError, match=message) as refused:
        begun(Gate())
    least = float(re.findall(r"max_reply = (\d+)", str(refused.value))[0])
    begun(Gate(max_reply=least))  # the cure is one
    with pytest.raises(InputError, match="takes 1,000; give a model with fewer features"):
        begun(Gate(max_reply=least, max_bytes=1000))
    AlgorithmStrategy(recipes.fedavg(Setting(model, (1 / 3,) * 3)), clients=3, classes=3)


def test_a_client_says_itself_that_its_reply_is_too_large(
    setting: Setting, federation: Federation
) -> None:
    """A method whose clients send two megabytes more than the model."""
    inner = recipes.fedavg(setting)

    class Wordy(type(inner)):  # type: ignore[misc]
        def client_update(self, *args: Any) -> Any:
            update, state = super().client_update(*args)
            return {**update, "more": {"zeros": torch.zeros(500_000)}}, state

    method = Wordy(**vars(inner))
    grid = LocalGrid(client_app(sites(method, federation)), len(SIZES))
    with pytest.raises(TrainingError, match=r"client 0: its reply has 2,0.* raise training.max_re"):
        next(play(strategy_of(method, federation), grid, 1))


def test_registrations_are_bounded_by_the_number_of_classes(
    setting: Setting, federation: Federation
) -> None:
    grid = Answering(client_app(sites(recipes.fedpals(setting, lam=0.0), federation)), len(SIZES))
    grid.kind, long = "query.register", np.zeros(1 << 20)
    grid.change = lambda content: content.update(  # type: ignore[method-assign]
        table=ArrayRecord({"n": Array(np.zeros(())), "labels": Array(long)})
    )
    strategy = strategy_of(recipes.fedpals(setting, lam=0.0), federation)
    with pytest.raises(InputError, match=r"2 arrays of \d+ bytes; allowed: 100000 and 65584"):
        next(play(strategy, grid, 1))


def test_what_clients_keep_is_shown_to_no_one(setting: Setting, federation: Federation) -> None:
    """Unless their app is made to: a personal model stays at its client."""
    algorithm = recipes.ditto(setting)
    strategy = strategy_of(algorithm, federation)
    grid = LocalGrid(client_app(sites(algorithm, federation)), len(SIZES))
    with pytest.raises(TrainingError, match="does not show its state: No query function"):
        list(play(strategy, grid, 1, states=lambda t: True))
    grid = LocalGrid(deployed.client_app, 1)
    question = Message(RecordDict(), message_type="query.state", dst_node_id=1000)
    (reply,) = grid.send_and_receive([question])
    assert "No query function" in reply.error.reason


@pytest.mark.parametrize(("seconds", "times"), [(1e-9, 1), (60.0, 4)])
def test_failed_clients_are_asked_again_while_there_is_time(
    seconds: float, times: int, setting: Setting, federation: Federation
) -> None:
    algorithm, clients = recipes.fedavg(setting), []
    good = sites(algorithm, federation)

    def site(i: int) -> Any:
        clients.append(i)
        if i == 2 and len(clients) > len(SIZES):
            raise RuntimeError("no memory")
        return good(i)

    grid = LocalGrid(client_app(site), len(SIZES))
    strategy = strategy_of(algorithm, federation)
    messages = strategy.configure_train(1, to_record({}), ConfigRecord(), grid)
    replies = answered(grid, messages, seconds, 3)
    assert clients[len(SIZES) :].count(2) == times
    assert len(replies) == len(SIZES)
    assert [failure_of(reply) for reply in replies if failure_of(reply)] == [
        "RuntimeError: no memory"
    ]
