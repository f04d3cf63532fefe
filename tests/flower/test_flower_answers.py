"""Invalid answers of clients, when they register and when they score a model."""

from __future__ import annotations

import re
from collections.abc import Callable
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
from fedshift.flower.records import to_record
from fedshift_deploy.machines import deployed
from support.flower_runs import Answering, sites, strategy_of

Change = Callable[[RecordDict], None]


@pytest.fixture
def federation(mlp: Model) -> Federation:
    return make_federation(mlp)


def answering(algorithm: Any, federation: Federation, kind: str, change: Change) -> LocalGrid:
    return Answering(client_app(sites(algorithm, federation)), len(SIZES), kind, change)


def _npy(shape: str, version: bytes = b"\x01\x00") -> bytes:
    """Eight bytes of numbers under a header with this shape."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header.encode() + bytes(8)


def without(*names: str) -> Change:
    def change(content: RecordDict) -> None:
        for name in names:
            del content[name]

    return change


def saying(name: str, **fields: Any) -> Change:
    return lambda content: content[name].update(fields)


def row(name: str, value: Any) -> Change:
    return lambda content: content["table"].update({name: Array(np.asarray(value))})


def with_bytes(data: bytes) -> Change:
    array = Array("float64", (), "numpy.ndarray", data)
    return lambda content: content["table"].update({"n": array})


# A changed registration, and what the error names.
REGISTERED: dict[str, tuple[Change, str]] = {
    "nothing": (without("who", "table"), '"who"'),
    "no table": (without("table"), "'table'"),
    "a word for a number": (saying("who", client="two"), "ValueError"),
    "no bytes": (with_bytes(b""), "not NumPy's"),
    "a header of terabytes": (with_bytes(_npy("(1099511627776,)")), "1099511627776"),
    "a long header": (with_bytes(_npy("(1,)" + " " * 60_000)), "a header of 60"),
    "nested brackets": (with_bytes(_npy("(" * 9_000)), "not NumPy's"),
    "another version": (with_bytes(_npy("()", b"\x02\x00")), "not NumPy's"),
    "an archive": (with_bytes(b"PK\x05\x06" + bytes(18)), "not NumPy's"),
    "a pickle": (with_bytes(b"\x80\x04N."), "not NumPy's"),
    "an endless row": (row("labels", np.zeros(1 << 20)), "allowed: 100000 and 65584"),
    "no reason": (lambda c: c.update({"failure": ConfigRecord({"code": 7})}), "did not say why"),
    "another size": (row("n", 99.0), "16 labels for 99 examples"),
    "a size below 0": (row("n", -1.0), '"n" = -1.0'),
    "half an example": (row("n", 0.5), '"n" = 0.5'),
    "endless examples": (row("n", np.inf), '"n" = inf'),
    "trillions of examples": (row("n", 1e13), '"n" = 10000000000000.0'),
    "labels that are no numbers": (row("labels", np.full(5, np.nan)), '"labels" = [nan, nan'),
    "fewer labels": (row("labels", np.ones(4)), 'misshapen "labels"'),
}


@pytest.mark.parametrize("case", REGISTERED)
def test_registrations_that_are_refused(
    case: str, setting: Setting, federation: Federation
) -> None:
    """Whatever arrives, there is one message, which names the node."""
    (change, words), algorithm = REGISTERED[case], recipes.fedpals(setting, ess=0.9)
    grid = answering(algorithm, federation, "query.register", change)
    with pytest.raises(InputError, match=re.escape(words)) as error:
        strategy_of(algorithm, federation).begin(grid)
    assert str(error.value).startswith("node 1014 cannot take part: ")


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

    change = saying("score", **{name: [value] * 5 if name == "correct" else value})
    grid = Answering(client_app(site), len(SIZES), "evaluate", change)
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


def test_replies_are_bounded_by_the_model(setting: Setting, federation: Federation) -> None:
    """Larger replies are not decoded; the limit is a multiple of the model's size, plus 1 MiB."""
    algorithm = recipes.fedavg(setting)
    size = sum(v.nbytes for v in (federation.params | federation.buffers).values())

    def reason(more: int, times: float) -> str:
        zeros = ArrayRecord({"zeros": Array(np.zeros(more, np.uint8))})
        grid = answering(algorithm, federation, "train", lambda c: c.update({"more": zeros}))
        strategy = strategy_of(algorithm, federation, gate=Gate(max_reply=times))
        (played,) = play(strategy, grid, 1)
        assert [client for client, *_ in played.dropped] == [2]
        return played.dropped[0].reason

    limit = (1 << 20) + 8 * size
    assert reason(limit, 8).endswith(f"allowed: 100000 and {limit}")
    # Control: with a larger factor it is decoded, and refused for what it is.
    assert '"more' in reason(limit, 10_000)
    with pytest.raises(InputError, match="max_reply"):
        Gate(max_reply=0.0)


def test_statistics_that_no_reply_may_have_are_refused_before_round_1() -> None:
    """CCVR's, of 400 features: in the last round all replies would be refused."""
    torch.manual_seed(0)
    model = Model(Mlp((4,), (400,), 3))
    method = recipes.ccvr(Setting(model, target=(1 / 3,) * 3, rounds=2))

    def begun(gate: Gate) -> AlgorithmStrategy:
        return AlgorithmStrategy(method, clients=3, classes=3, gate=gate)

    with pytest.raises(InputError, match="3,849,624 bytes") as refused:
        begun(Gate())
    least = float(re.findall(r"max_reply = (\d+)", str(refused.value))[0])
    begun(Gate(max_reply=least))  # the cure is one
    with pytest.raises(InputError, match="takes 1,000"):
        begun(Gate(max_reply=least, max_bytes=1000))


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
    with pytest.raises(TrainingError, match=r"client 0: its reply has 2,0.* training.max_reply"):
        next(play(strategy_of(method, federation), grid, 1))


def test_what_clients_keep_is_shown_to_no_one(setting: Setting, federation: Federation) -> None:
    """Unless their app is made to: a personal model stays at its client."""
    algorithm = recipes.ditto(setting)
    strategy = strategy_of(algorithm, federation)
    grid = LocalGrid(client_app(sites(algorithm, federation)), len(SIZES))
    with pytest.raises(TrainingError, match="No query function"):
        list(play(strategy, grid, 1, states=lambda t: True))
    grid = LocalGrid(deployed.client_app, 1)
    question = Message(RecordDict(), message_type="query.state", dst_node_id=1000)
    (reply,) = grid.send_and_receive([question])
    assert "No query function" in reply.error.reason
