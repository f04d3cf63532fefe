"""FedPALS as a strategy in Flower apps that use nothing else of the library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, QFedAvg, Result

from fedshift.errors import InputError
from fedshift.flower import FedPALS, LocalGrid
from fedshift.server.pals import effective_sample_size, pals_weights

COUNTS = [[30, 0, 10], [5, 20, 5], [0, 10, 40], [8, 8, 8]]
TARGET = (0.2, 0.5, 0.3)
START = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "seen": np.array(3)}
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def moved(client: int, w: np.ndarray) -> np.ndarray:
    return w + np.float32(client + 1) * np.array([[1, -2, 3], [0.1, 0.2, 0.3]], dtype=np.float32)


def app_of(change: dict[int, Change] | None = None) -> ClientApp:
    """Clients in NumPy alone: client i adds i + 1 times a constant, and reports its labels."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        got = {k: v.numpy() for k, v in message.content["arrays"].items()}
        arrays = {"w": moved(client, got["w"]), "seen": got["seen"] + client}
        metrics = {
            "train_loss": float(client),
            "num-examples": 10**6 if client == 0 else 1,  # FedPALS must not believe it
            "label-counts": COUNTS[client],
            "partition-id": client,
        }
        (change or {}).get(client, lambda a, m: None)(arrays, metrics)
        made = {k: v if isinstance(v, Array) else Array(np.asarray(v)) for k, v in arrays.items()}
        record = ArrayRecord(made)
        content = RecordDict({"arrays": record, "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    return app


def played(strategy: Any, app: ClientApp, rounds: int = 1) -> Result:
    start = ArrayRecord({k: Array(v) for k, v in START.items()})
    return strategy.start(LocalGrid(app, 4), start, num_rounds=rounds)


def pals(**given: Any) -> FedPALS:
    return FedPALS(TARGET, **({"ess": 0.8, "inner": FedAvg(fraction_evaluate=0.0)} | given))


def test_the_mean_has_the_weights_of_the_programme() -> None:
    strategy = pals()
    result = played(strategy, app_of())
    solved = pals_weights(COUNTS, TARGET, ess=0.8)
    assert list(strategy.weights.values()) == solved.weights.tolist()
    wanted = sum(a * moved(i, START["w"]).astype(float) for i, a in enumerate(solved.weights))
    arrays = {k: v.numpy() for k, v in result.arrays.items()}
    assert np.array_equal(arrays["w"], wanted.astype(np.float32))
    assert (arrays["w"].dtype, arrays["seen"].dtype) == (np.float32, np.int64)
    assert arrays["seen"] == 6  # the largest of 3, 4, 5, 6: counters are never averaged
    metrics = result.train_metrics_clientapp[1]
    assert metrics["pals-gap"] == pytest.approx(float(np.linalg.norm(solved.residual)))
    assert metrics["pals-ess"] == pytest.approx(
        effective_sample_size(solved.weights, [40, 30, 50, 24])
    )
    assert metrics["train_loss"] == pytest.approx(float(solved.weights @ np.arange(4)))
    assert not {"label-counts", "partition-id", "num-examples"} & metrics.keys()


def set_to(name: str, value: Any) -> Change:
    return lambda arrays, metrics: arrays.update({name: value})


def dropped(name: str) -> Change:
    return lambda arrays, metrics: metrics.pop(name)


def of_bytes(data: bytes) -> Change:
    return set_to("w", Array("float32", (2, 3), "numpy.ndarray", data))


def reporting(name: str, value: Any) -> Change:
    return lambda arrays, metrics: metrics.update({name: value})


def failing(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
    raise RuntimeError("no disk left")


REFUSED: dict[str, tuple[Change, str]] = {
    "not finite": (set_to("w", np.full((2, 3), np.inf, np.float32)), '"w"'),
    "misshapen": (set_to("w", np.zeros((3, 2), np.float32)), '"w" is float32 (3, 2)'),
    "another type": (set_to("w", np.zeros((2, 3))), '"w" is float64 (2, 3)'),
    "another model": (set_to("b", np.zeros(2)), "['b']"),
    "no report": (dropped("label-counts"), '"label-counts"'),
    "no bytes": (of_bytes(b""), "cannot be read"),
    "an archive": (of_bytes(b"PK\x05\x06" + bytes(18)), "archive"),
    "other labels": (reporting("label-counts", [1, 2, 3, 4]), '"label-counts" has 4 numbers'),
    "negative": (reporting("label-counts", [1, -2, 3]), '"label-counts"'),
    "counts that overflow": (reporting("label-counts", [1e308] * 3), '"label-counts"'),
    "counts near 0": (reporting("label-counts", [5e-324, 0.0, 0.0]), '"label-counts"'),
    "no examples": (reporting("label-counts", [0, 0, 0]), "no examples"),
    "no partition": (reporting("partition-id", float("nan")), '"partition-id" = nan'),
    "an error": (failing, "no disk left"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_replies_that_cannot_be_used_are_left_out(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, (change, words) = pals(), REFUSED[case]
    result = played(strategy, app_of({1: change}))
    assert "round 1: left out node 1007" in caplog.text
    assert words in caplog.text
    solved = pals_weights([COUNTS[i] for i in (0, 2, 3)], TARGET, ess=0.8)
    assert list(strategy.weights.values()) == solved.weights.tolist()
    assert strategy.gap == pytest.approx(float(np.linalg.norm(solved.residual)))
    assert np.isfinite(result.arrays["w"].numpy()).all()


def test_clients_whose_given_row_is_unknown_are_left_out() -> None:
    """Two nodes of one partition, and a client without examples."""
    strategy = pals(label_counts=COUNTS)
    played(strategy, app_of({3: reporting("partition-id", 1)}))
    solved = pals_weights([COUNTS[0], COUNTS[2]], TARGET, ess=0.8)
    assert list(strategy.weights.values()) == solved.weights.tolist()
    strategy = pals(label_counts=[*COUNTS[:3], [0, 0, 0]])
    played(strategy, app_of())
    solved = pals_weights(COUNTS[:3], TARGET, ess=0.8)
    assert list(strategy.weights.values()) == solved.weights.tolist()


def test_too_few_are_left_to_share_a_cap() -> None:
    """If a reply is lost the model stays; if all are there, the cap itself is wrong."""
    result = played(pals(cap=0.3), app_of({1: failing}))
    assert not result.train_metrics_clientapp
    with pytest.raises(InputError, match="cap=0.2"):
        played(pals(cap=0.2), app_of())


SILENT = dict.fromkeys(range(4), dropped("label-counts"))
NOWHERE = dict.fromkeys(range(4), dropped("partition-id"))
DOUBLE = dict.fromkeys(range(4), set_to("w", Array(np.ones((2, 3)))))
MEDIAN, QFED = FedMedian(), QFedAvg(client_learning_rate=0.1)
METRICS = FedAvg(train_metrics_aggr_fn=lambda records, key: MetricRecord())
TARGETS = ({0: 0.2, 1: 0.8}, "uniform", None, 0.5, [[0.2, 0.8]], ["a"])
WRONG: list[tuple[Callable[[], Any], str]] = [
    *((partial(FedPALS, target, ess=0.8), "target") for target in TARGETS),
    *((partial(pals, **{name: "0.5"}), name) for name in ("lam", "ess", "cap")),
    (partial(pals, inner=MEDIAN), "FedMedian"),
    (partial(pals, inner=QFED), "QFedAvg"),
    (partial(pals, inner=METRICS), "train_metrics_aggr_fn"),
    (partial(FedPALS, TARGET), "exactly one of lam and ess"),
    # A run that trains nothing must not succeed.
    (lambda: played(pals(label_counts=COUNTS), app_of(NOWHERE)), '"partition-id"'),
    (lambda: played(pals(label_counts={9: COUNTS[0]}), app_of()), "no row for partition 0"),
    (lambda: played(pals(), app_of(SILENT)), "label_counts="),
    (lambda: played(pals(label_counts=COUNTS), app_of(DOUBLE)), "node 1000.*float64"),
    (lambda: pals().corrected(MODEL, "b"), "no round was played"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_refused(number: int) -> None:
    call, words = WRONG[number]
    with pytest.raises(InputError, match=words):
        call()


def test_what_has_no_weight_is_nowhere() -> None:
    """0 * NaN is NaN; and the counters of clients 1 and 3 are not those of the mean."""
    target = (0.1, 0.1, 0.8)
    weights = pals_weights(COUNTS, target, lam=1.0).weights
    assert weights[1] == weights[3] == 0.0
    strategy = FedPALS(target, lam=1.0, inner=FedAvg(fraction_evaluate=0.0))
    result = played(strategy, app_of({1: reporting("train_loss", float("nan"))}))
    loss = result.train_metrics_clientapp[1]["train_loss"]
    assert loss == pytest.approx(float(weights @ np.arange(4)))
    assert result.arrays["seen"].numpy() == 3 + 2


def test_sums_are_in_the_order_of_partitions() -> None:
    strategy, grid = pals(), LocalGrid(app_of(), 4, partitions={0: 3, 1: 1, 2: 0, 3: 2})
    strategy.start(grid, ArrayRecord({k: Array(v) for k, v in START.items()}), num_rounds=1)
    assert list(strategy.weights) == [1014, 1007, 1021, 1000]


def test_the_first_report_stays() -> None:
    calls = {"n": 0}

    def greedy(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        calls["n"] += 1
        if calls["n"] > 1:
            metrics["label-counts"] = [200, 500, 300]

    strategy = pals()
    played(strategy, app_of({2: greedy}), rounds=2)
    assert list(strategy.weights.values()) == pals_weights(COUNTS, TARGET, ess=0.8).weights.tolist()


@pytest.mark.parametrize("counts", [COUNTS, dict(enumerate(COUNTS))], ids=["rows", "by id"])
def test_given_counts_need_no_report(counts: Any) -> None:
    strategy = pals(label_counts=counts)
    played(strategy, app_of(SILENT))
    assert list(strategy.weights.values()) == pals_weights(COUNTS, TARGET, ess=0.8).weights.tolist()


def test_a_round_without_any_reply_keeps_the_model() -> None:
    calls = {"n": 0}

    def once(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        calls["n"] += 1
        if calls["n"] > 4:
            raise RuntimeError("gone")

    result = played(pals(), app_of(dict.fromkeys(range(4), once)), rounds=2)
    assert list(result.train_metrics_clientapp) == [1]


@pytest.mark.parametrize(
    "inner", [partial(FedAdam, eta=0.3), partial(FedAvgM, server_momentum=0.9)], ids=["adam", "m"]
)
def test_flowers_server_optimisers_step_along_the_weighted_mean(inner: Any) -> None:
    """As Flower's strategy alone, given FedPALS' weights as numbers of examples."""
    weights = pals_weights(COUNTS, TARGET, ess=0.8).weights

    def weight_as_examples(client: int) -> Change:
        def change(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
            arrays["seen"] = np.array(3)
            metrics.clear()
            metrics["num-examples"] = float(weights[client])

        return change

    def same(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        arrays["seen"] = np.array(3)

    options = {"fraction_evaluate": 0.0}
    theirs = played(
        inner(**options), app_of({i: weight_as_examples(i) for i in range(4)}), rounds=3
    )
    ours = played(pals(inner=inner(**options)), app_of(dict.fromkeys(range(4), same)), rounds=3)
    plain = played(pals(), app_of(dict.fromkeys(range(4), same)), rounds=3)
    assert np.allclose(ours.arrays["w"].numpy(), theirs.arrays["w"].numpy(), rtol=2e-6)
    assert not np.allclose(ours.arrays["w"].numpy(), plain.arrays["w"].numpy(), rtol=1e-2)
    assert ours.arrays["seen"].numpy().dtype == np.int64
    assert ours.arrays["w"].numpy().dtype == np.float32


BIAS = np.array([0.5, -1.0, 0.25], dtype=np.float32)
MODEL = ArrayRecord({"w": Array(np.ones((3, 2), np.float32)), "b": Array(BIAS)})


def test_the_bias_has_the_correction_of_the_last_round() -> None:
    strategy, rows = pals(), np.array(COUNTS) / np.array(COUNTS).sum(1, keepdims=True)
    played(strategy, app_of())
    mixture = pals_weights(COUNTS, TARGET, ess=0.8).weights @ rows
    after = {k: v.numpy() for k, v in strategy.corrected(MODEL, "b").items()}
    expected = (BIAS + np.log(TARGET) - np.log(mixture)).astype(np.float32)
    assert np.allclose(after["b"], expected, atol=1e-6)
    assert after["b"].dtype == np.float32
    assert np.array_equal(after["w"], np.ones((3, 2)))
    with pytest.raises(InputError, match='"w" is no array of 3 labels'):
        strategy.corrected(MODEL, "w")
    with pytest.raises(InputError, match="corrected already"):
        strategy.corrected(strategy.corrected(MODEL, "b"), "b")
