"""A calibrator from clients' sums by messages equals that of one process; a liar's sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Context, Message, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedshift.client.local import Local
from fedshift.data import Examples
from fedshift.errors import InputError
from fedshift.evaluation.scores import answered
from fedshift.flower import LocalGrid, Site, client_app, play
from fedshift.flower.calibrating import SUMS
from fedshift.flower.client import partition
from fedshift.flower.records import to_parts, to_record
from fedshift.model import build
from fedshift.recipes import Setting, fedavg
from fedshift.server.prior import CalibrationSums, Calibrator, calibrate, calibration_sums
from fedshift_deploy.machines.remote_sums import calibrated_by
from support.federations import CLASSES, SIZES, TARGET, Normed, make_clients, make_federation
from support.flower_runs import strategy_of

LIAR = 2
Sums = dict[str, Tensor]
Change = Callable[[Sums], Sums]


class Played:
    """Two rounds on a grid, after which the liar changes its sums."""

    def __init__(self, change: Change | None = None) -> None:
        model = build(Normed, seed=0)
        self.federation = make_federation(model)
        self.method = fedavg(Setting(model, target=TARGET, local=Local(lr=0.1, steps=5)))
        # Other examples than those trained on, more of some clients than of others.
        held_out = make_clients(1)
        self.validation = [Examples(one.x, one.y) for one in held_out]
        self.events: list[Mapping[str, Any]] = []
        first = (self.federation.params, self.federation.buffers)

        def site(i: int) -> Site:
            data = self.federation.clients[i]
            return Site(self.method, data, self.federation.seeds.batch, self.validation[i], first)

        app = client_app(site)

        def answer(message: Message, context: Context) -> Message:
            reply = app(message, context)
            is_query = message.metadata.message_type == "query.calibrate"
            if change is not None and is_query and partition(context) == LIAR:
                sums = change(to_parts(reply.content.array_records)[SUMS])
                reply.content = RecordDict({**reply.content, SUMS: to_record(sums)})
            return reply

        self.grid = LocalGrid(answer, len(SIZES))  # type: ignore[arg-type]
        self.strategy = strategy_of(self.method, self.federation, tell=self.events.append)
        *_, self.last = play(self.strategy, self.grid, 2)

    def calibrator(self, counts: Mapping[int, Tensor] | None = None) -> Calibrator:
        return calibrated_by(self.strategy, self.grid, self.last, counts)

    def here(self, clients: Sequence[int]) -> Calibrator:
        """The calibrator of these clients in one process."""
        pair = self.last.server["params"], self.last.server["buffers"]
        logits = {
            i: torch.cat([z for z, *_ in answered(self.method.model, *pair, self.validation[i])])
            for i in clients
        }

        def ask(scale: float, bias: NDArray[np.float64]) -> CalibrationSums:
            each = [
                calibration_sums(
                    logits[i].double().numpy(), self.validation[i].y.numpy(), scale, bias
                )
                for i in clients
            ]
            return reduce(add, each)

        return calibrate(ask, CLASSES)


def same(one: Calibrator, other: Calibrator) -> bool:
    """Bit for bit."""
    arrays = zip((one.bias, one.prior), (other.bias, other.prior), strict=True)
    return one.scale == other.scale and all(np.array_equal(a, b) for a, b in arrays)


@pytest.fixture(scope="module")
def honest() -> Played:
    return Played()


def test_the_calibrator_is_that_of_one_process(honest: Played) -> None:
    everyone = range(len(SIZES))
    sent = honest.calibrator()
    assert same(sent, honest.here(everyone))
    assert not same(sent, honest.here(everyone[1:]))
    assert not honest.events
    # Sums alone go up: K (K + 5) + 3 numbers, whatever the number of examples.
    assert honest.grid.traffic.messages["query.calibrate"] % len(SIZES) == 0


def test_a_client_that_is_gone_is_left_out_of_all_steps(honest: Played) -> None:
    honest.grid.absent.add(list(honest.grid.contexts)[1])
    try:
        assert same(honest.calibrator(), honest.here([0, 2, 3, 4, 5]))
        honest.grid.absent |= set(honest.grid.contexts)
        with pytest.raises(InputError, match="no client sent sums"):
            honest.calibrator()
    finally:
        honest.grid.absent.clear()


def times(factor: float) -> Change:
    return lambda sums: {k: v * factor for k, v in sums.items()}


def changed(name: str, f: Callable[[Tensor], Tensor]) -> Change:
    return lambda sums: sums | {name: f(sums[name])}


def put(v: Tensor, at: tuple[int, ...], number: float) -> Tensor:
    v[at] = number
    return v


LIES = {
    "a gradient of other examples": changed("gradient", lambda v: v + 1.0),
    "a gradient beyond all examples": changed("gradient", lambda v: v * 1e6),
    "a hessian of no softmax": changed("hessian", lambda v: -v),
    "a hessian that pulls one bias": changed("hessian", lambda v: v + torch.eye(len(v)).double()),
    "a slope of endless logits": changed("gradient", lambda v: put(v, (0,), 1e300)),
    "a curvature of endless logits": changed("hessian", lambda v: put(v, (0, 0), 1e300)),
    "a loss below 0": changed("loss", lambda v: -v - 1.0),
    "counts that are none": changed("counts", lambda v: v + 0.5),
    "not a number": changed("gradient", lambda v: v * torch.nan),
    "other classes": changed("counts", lambda v: v[1:]),
    "floats of 32 bits": changed("gradient", lambda v: v.float()),
    "nothing": lambda sums: {},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("lie", LIES)
def test_sums_that_no_examples_have(lie: str, honest: Played) -> None:
    """The liar is left out and named; the calibrator is that of the other clients."""
    played = Played(LIES[lie])
    assert same(played.calibrator(), played.here([0, 1, 3, 4, 5]))
    (event,) = played.events
    assert (event["event"], event["client"]) == ("unscored", LIAR)
    assert "sums" in str(event["reason"])


@pytest.mark.slow
def test_sums_of_more_examples_than_it_has() -> None:
    """Sums that count each example a million times look valid, and would decide the calibrator."""
    played, honest = Played(times(1e6)), Played()
    counts = {i: v.y.bincount(minlength=CLASSES) for i, v in enumerate(played.validation)}
    assert same(played.calibrator(counts), played.here([0, 1, 3, 4, 5]))
    # The control: where the server does not know the counts, they are believed.
    moved = played.calibrator()
    assert np.abs(moved.prior - played.here([LIAR]).prior).max() < 1e-3
    assert np.abs(honest.calibrator().prior - played.here([LIAR]).prior).max() > 0.05
