"""One run's models for other targets, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedshift as fs
from fedshift.fitting.result import Result
from support.custom_tasks import Net, hospitals, rows

QUICK: dict[str, Any] = {"rounds": 2, "steps": 2, "evaluate_every": 1, "progress": False}
HALF = {"ill": 0.5, "well": 0.5}


@pytest.fixture(scope="module")
def result() -> Result:
    return fs.fit(hospitals(), Net, prior="none", **QUICK)


def odds(given: Any) -> np.ndarray:
    p = given.probabilities
    return np.log(p[:, 0] / p[:, 1])


def trained_odds(result: Result) -> float:
    """log p_0 / p_1 of the mixture that the server's model was trained on."""
    counts, a = np.array(result.summary.label_counts), np.array(result.summary.weights)
    p = a @ (counts / counts.sum(1, keepdims=True))
    return float(np.log(p[0] / p[1]))


@pytest.mark.slow
def test_odds_move_by_the_shares(result: Result) -> None:
    x, _, _ = rows()
    at = {t: odds(result.for_target([t, 1 - t]).predict(x)) for t in (0.1, 0.5, 0.9)}
    for one, other in ((0.1, 0.5), (0.5, 0.9)):
        expected = np.log(other / (1 - other)) - np.log(one / (1 - one))
        assert np.allclose(at[other] - at[one], expected, atol=1e-5)
    # From the model as it was trained: log T - log p.
    by_mixture = fs.fit(hospitals(), Net, prior="target", **QUICK)
    pair, half = by_mixture.models.uncorrected, odds(by_mixture.for_target([0.5, 0.5]).predict(x))
    with torch.no_grad():
        z = by_mixture.models.model(*pair, torch.from_numpy(x))["logits"].double().numpy()
    assert np.allclose(half, z[:, 0] - z[:, 1] - trained_odds(by_mixture), atol=1e-5)


def test_a_label_that_the_target_lacks_is_not_predicted(result: Result) -> None:
    x, _, _ = rows()
    assert set(result.for_target({"ill": 0, "well": 1}).predict(x).names) == {"well"}
    assert set(result.predict(x).names) == {"ill", "well"}


def test_what_is_exported_is_corrected(result: Result, tmp_path: Path) -> None:
    x, _, _ = rows()
    even = result.for_target(HALF)
    net = even.module()
    assert type(net) is type(result.module())  # an ordinary network: its last bias has the shift
    with torch.no_grad():
        expected = net(torch.from_numpy(x)).softmax(1).numpy()
    assert np.allclose(even.predict(x).probabilities, expected, atol=1e-6)
    assert not np.allclose(result.predict(x).probabilities, expected, atol=1e-2)
    script = torch.jit.load(even.export(tmp_path / "net.ts"))
    with torch.no_grad():
        assert np.allclose(script(torch.from_numpy(x)).softmax(1).numpy(), expected, atol=1e-6)
    state = torch.load(even.export(tmp_path / "net.pt"), weights_only=True)
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())


def test_twice_is_once(result: Result) -> None:
    """Each target is taken from the model as it was trained."""
    x, _, _ = rows()
    first = result.for_target(HALF).predict(x).probabilities
    result.for_target({"ill": 0.9, "well": 0.1}).predict(x)
    assert np.array_equal(result.for_target([1.0, 1.0]).predict(x).probabilities, first)


class Bare(nn.Module):
    """A last layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x).tanh())
        return logits


def test_a_layer_without_bias_keeps_it_beside(tmp_path: Path) -> None:
    x, _, _ = rows()
    result = fs.fit(hospitals(), Bare, prior="none", **QUICK)
    even = result.for_target(HALF)
    with torch.no_grad():
        expected = even.module()(torch.from_numpy(x)).softmax(1).numpy()
    assert np.allclose(even.predict(x).probabilities, expected, atol=1e-6)
    script = torch.jit.load(even.export(tmp_path / "net.ts"))
    with torch.no_grad():
        assert np.allclose(script(torch.from_numpy(x)).softmax(1).numpy(), expected, atol=1e-6)
    shift = odds(even.predict(x)) - odds(result.for_target([0.9, 0.1]).predict(x))
    assert np.allclose(shift, -np.log(9), atol=1e-5)


def test_a_clients_model_is_corrected_from_its_own_shares() -> None:
    x, _, _ = rows()
    result = fs.fit(hospitals("clients"), Net, method="local_only", **QUICK)
    counts = np.array(result.summary.label_counts)
    even = result.for_target(HALF)
    for place, name in enumerate(result.clients):
        pair = result.models.served[place]
        with torch.no_grad():
            z = result.models.model(*pair, torch.from_numpy(x))["logits"].double().numpy()
        p = counts[place] / counts[place].sum()
        expected = z[:, 0] - z[:, 1] - np.log(p[0] / p[1])
        assert np.allclose(odds(even.predict(x, client=name)), expected, atol=1e-4), name
    with pytest.raises(fs.InputError, match="local_only leaves no model for all"):
        even.predict(x)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("north", r'for_target\("north"\): give label shares or counts'),
        ({"ill": 1.0}, 'target has no entry for "well"'),
        ({"ill": 0.5, "wel": 0.5}, 'the label "wel" is not among the classes'),
        ([0.2, 0.3, 0.5], "target has 3 entries for 2 classes"),
        ([-1.0, 2.0], "0 or more"),
    ],
    ids=["a client", "a class left out", "an unknown class", "too many", "negative"],
)
def test_what_is_no_target(result: Result, target: Any, why: str) -> None:
    with pytest.raises(fs.InputError, match=why):
        result.for_target(target)


@pytest.mark.few(2)
@pytest.mark.parametrize(("method", "even"), [("balanced_softmax", True), ("fedavg", False)])
@pytest.mark.parametrize("target", ["clients", "north"])
def test_shares_that_training_takes_out_are_even(method: str, even: bool, target: str) -> None:
    """Also of clients that serve the model on data of their own; FedAvg is the control."""
    done = fs.fit(hospitals(target), Net, method=method, prior="none", **QUICK)
    x, _, _ = rows()
    moved = odds(done.for_target(HALF).predict(x)) - odds(done.predict(x))
    assert np.allclose(moved, 0.0 if even else -trained_odds(done), atol=1e-5)
    assert abs(trained_odds(done)) > 1e-3
