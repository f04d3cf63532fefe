"""Every method on Flower's messages: the numbers of the engine in one process, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.data import Examples
from fedshift.evaluation.scores import score
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.tree import flatten
from support.every_method import MAKE, Make
from support.federations import CLASSES, SIZES, TARGET, make_clients, make_federation
from support.routing import routed_model

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from fedshift.errors import InputError
from fedshift.flower import LocalGrid, client_app, play
from fedshift.flower.arriving import read_arrays
from fedshift.flower.records import failure_of, to_record
from support.flower_runs import differing_tensors, in_process, on_flower, sites, strategy_of

pytestmark = pytest.mark.routed

ROUNDS, COHORT = 3, 4


@pytest.fixture
def setting(mlp: Model) -> Setting:
    """Few batches: each of them is one more chance to differ, and none differs on its own."""
    return Setting(mlp, TARGET, Local(lr=0.1, epochs=1, batch=16))


@pytest.mark.few(1)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_every_method_is_the_same_on_flower(make: Make, setting: Setting, federated: Any) -> None:
    algorithm, federation = make(setting), federated()
    here = in_process(algorithm, federation, ROUNDS, COHORT)
    there = on_flower(algorithm, federation, ROUNDS, cohort=COHORT)
    assert here.states  # else half of the comparison would be of nothing
    assert differing_tensors(here, there) == []
    assert (here.t, here.trained, here.loss) == (there.t, there.trained, there.loss)


class Noisy(torch.nn.Module):
    """A network of every method whose inputs are noisy in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = routed_model().net

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x + torch.randn_like(x) if self.training else x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "moon", "ditto", "fedsam"])
def test_networks_that_draw_are_the_same_on_flower(name: str, federated: Any) -> None:
    """Clients there do not know the result of this process's trial of the network."""
    rounds, ends = 2, []
    for play_rounds in (in_process, on_flower, in_process):
        model = Model(Noisy()) if len(ends) < 2 else routed_model()
        params, buffers = model.init()
        if len(ends) < 2:  # networks of different objects start alike
            params = {f"inner.{k}": v for k, v in routed_model().init()[0].items()}
        federation = replace(federated(), params=params, buffers=buffers)
        setting = Setting(model, TARGET, Local(lr=0.1, epochs=1, batch=16))
        ends.append(play_rounds(MAKE[name](setting), federation, rounds))
    assert differing_tensors(ends[0], ends[1]) == []
    assert ends[0].loss == ends[1].loss != ends[2].loss


@pytest.mark.slow
def test_bfloat16_and_batch_norm_are_the_same_on_flower(
    setting: Setting, normed: Model, federated: Any
) -> None:
    """Types, buffers and counters travel."""
    for base, federation in (
        (replace(setting, local=replace(setting.local, precision="bfloat16")), federated()),
        (replace(setting, model=normed), make_federation(normed, make_clients(sizes=(16, 24, 40)))),
    ):
        algorithm = recipes.scaffold(base, option="I")
        here = in_process(algorithm, federation, 2)
        assert differing_tensors(here, on_flower(algorithm, federation, 2)) == []


def test_the_comparison_can_fail(setting: Setting, federated: Any) -> None:
    """Another seed on one client, and a client that lost its state, are detected."""
    federation = federated()

    def other_seed(algorithm: Any) -> Any:
        site = sites(algorithm, federation)
        return lambda i: replace(site(i), seed=federation.seeds.batch + (i == 2))

    algorithm = recipes.scaffold(setting)
    here = in_process(algorithm, federation, 2)
    assert differing_tensors(here, on_flower(algorithm, federation, 2, site=other_seed(algorithm)))

    grid = LocalGrid(client_app(sites(algorithm, federation), open_states=True), len(SIZES))
    played = []
    for one in play(strategy_of(algorithm, federation), grid, 2, states=lambda t: t == 2):
        played.append(one)
        for context in grid.contexts.values():
            context.state.clear()
    assert differing_tensors(here, played[-1])


def test_flower_can_drive_the_rounds(setting: Setting, federated: Any) -> None:
    """`Strategy.start`, as a ServerApp calls it."""
    algorithm, federation = recipes.fedpals(setting, ess=0.6), federated()
    strategy = strategy_of(algorithm, federation)
    grid = LocalGrid(client_app(sites(algorithm, federation)), len(SIZES))
    result = strategy.start(grid, to_record(federation.params), num_rounds=2)
    server = in_process(algorithm, federation, 2).server
    assert strategy.current is not None
    assert flatten(strategy.current.server).keys() == flatten(server).keys()
    given = result.arrays.to_torch_state_dict()
    assert all(torch.equal(given[k], v) for k, v in server["params"].items())
    assert result.train_metrics_clientapp[2]["clients"] == len(strategy.current.trained)


def test_arrays_arrive_as_they_were() -> None:
    """Types, shapes and orders of memory; in memory of torch's own."""
    sent = {
        "row": np.arange(6, dtype=np.float32).reshape(2, 3),
        "column": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        "count": np.array(7),
        "none": np.zeros((0, 3), np.float16),
        "flags": np.array([True, False]),
    }
    for _ in range(2):  # read, then known
        record = ArrayRecord({k: Array(v) for k, v in sent.items()})
        received = read_arrays({"part": record}, 1 << 20)["part"]
        for name, v in sent.items():
            assert received[name].is_contiguous()
            assert np.array_equal(received[name].numpy(), v)
            assert received[name].numpy().dtype == v.dtype
    with pytest.raises(InputError, match="allowed: 100000 and 99"):
        read_arrays({"part": record}, 99)
    array = Array(sent["row"])
    array.data = array.data[:-1]  # its header is known, and is not true of it
    with pytest.raises(InputError, match="in 23 bytes"):
        read_arrays({"part": ArrayRecord({"a": array})}, 1 << 20)


def test_only_what_the_method_reads_is_registered(setting: Setting, federated: Any) -> None:
    federation = federated()
    for method, columns in ((recipes.fedavg, {"n"}), (recipes.fedpals, {"n", "labels"})):
        algorithm = method(setting, **({"ess": 0.6} if columns > {"n"} else {}))
        strategy = strategy_of(algorithm, federation)
        strategy.begin(LocalGrid(client_app(sites(algorithm, federation)), len(SIZES)))
        assert strategy.met is not None
        assert strategy.met.table.keys() == columns
        for name, column in strategy.met.table.items():
            assert torch.equal(column, federation.table[name])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "on_clients"), [("ditto", False), ("ditto", True), ("fedpac", True)]
)
def test_clients_score_as_the_server_would(
    method: str, on_clients: bool, setting: Setting, federated: Any
) -> None:
    algorithm, federation = getattr(recipes, method)(setting), federated()
    held_out = [Examples(c.x[::2], c.y[::2]) for c in federation.clients]
    site = sites(algorithm, federation)
    app = client_app(lambda i: replace(site(i), validation=held_out[i]))
    strategy = strategy_of(algorithm, federation, own=on_clients, evaluates=lambda t: t == 2)
    grid = LocalGrid(app, len(SIZES))
    result = strategy.start(grid, to_record({}), num_rounds=2)
    here = in_process(algorithm, federation, 2)
    for i, examples in enumerate(held_out):
        pair = (here.server["params"], here.server["buffers"])
        if on_clients:
            pair = algorithm.model_for(here.server, here.states[i])
        wanted, got = score(algorithm.model, *pair, examples, CLASSES), strategy.scores[i]
        assert torch.equal(wanted.correct, got.correct)
        assert wanted.loss_sum == got.loss_sum
    right = sum(int(s.correct.sum()) for s in strategy.scores.values())
    pooled = result.evaluate_metrics_clientapp
    assert list(pooled) == [2]
    assert pooled[2]["accuracy"] == right / sum(map(len, held_out))


def test_models_that_need_more_than_was_sent_are_scored_by_the_server(
    setting: Setting, federated: Any
) -> None:
    algorithm, federation = recipes.labelset_fedavg(setting), federated()
    strategy = strategy_of(algorithm, federation, own=True, evaluates=lambda t: True)
    grid = LocalGrid(client_app(sites(algorithm, federation)), len(SIZES))
    list(play(strategy, grid, 1))
    assert strategy.scores == {}
    evaluating = strategy.configure_evaluate(1, to_record({}), ConfigRecord(), grid)
    replies = list(grid.send_and_receive(evaluating))
    assert "needs 'sets' of the server" in str(failure_of(replies[0]))


# As Flower wraps what Ray says of an actor that the system has killed.
RAY_SAYS = """<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing
\tclass_name: A\n\tactor_id: 7c14e01d921e6b7238b475b901000000\n\tpid: 1341
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit
detail: Worker unexpectedly exits with a connection error code 2. End of file.'>"""


def test_a_killed_actor_is_one_short_line() -> None:
    sent = Message(RecordDict(), dst_node_id=1, message_type="train")
    for reason, ending in ((RAY_SAYS, "fewer --actors"), ("<class 'ValueError'>:<'odd'>", "odd")):
        why = failure_of(Message(Error(code=0, reason=reason), reply_to=sent))
        assert str(why).endswith(ending)
        assert len(str(why)) < 100
