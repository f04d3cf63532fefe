"""Wrong uses in Python that once passed in silence: what each of them comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedshift import FedAvg, Federation, Local, Model, pals_weights, run
from fedshift.client.objectives import CrossEntropy
from fedshift.data import client_data, register
from fedshift.engine.backends import loop
from fedshift.engine.processes.pool import workers
from fedshift.errors import FedshiftError
from fedshift.seeds import Seeds
from fedshift.tree import flatten, unflatten


def _answer(use: Callable[[], str]) -> str:
    """What a use comes to: its own words, or the refusal."""
    try:
        return use()
    except FedshiftError as e:
        return f"refused: {e}"
    except Exception as e:
        return f"raw: {type(e).__name__}"


def _clients() -> list[Any]:
    labels = torch.arange(40) % 3
    source = torch.Generator().manual_seed(0)
    return [
        client_data(torch.randn(40, 4, generator=source) + 2 * labels[:, None], labels, i)
        for i in range(3)
    ]


def _federation(model: Model, **given: Any) -> Any:
    clients, (params, buffers) = _clients(), model.init()
    right = {"clients": clients, "params": params, "buffers": buffers}
    more = {"table": register(clients, 3), "seeds": Seeds.of(0)}
    return Federation(**(right | more | given))  # type: ignore[arg-type]


def _rounds(
    local: Local | None = None, rounds: Any = 3, given: Any = None, **more: Any
) -> list[Any]:
    torch.manual_seed(0)
    model = Model(nn.Linear(4, 3))
    method = FedAvg(model, local=local or Local(0.1, batch=20))
    return list(run(method, _federation(model, **(given or {})), rounds, **more))


def trap_schedule_below_zero() -> str:
    """lr=lambda t: 0.1 - 0.1 * t: from round 2 on, steps lead uphill."""

    def use() -> str:
        last = _rounds(Local(lambda t: 0.1 - 0.1 * t, batch=20))[-1]
        return f"silent: trained uphill, loss {last.loss:.2f}"

    return _answer(use)


def trap_true_for_rounds() -> str:
    """run(method, federation, True)."""
    return _answer(lambda: f"silent: {len(_rounds(rounds=True))} round")


def trap_true_for_the_batch() -> str:
    """Local(batch=True), to train in batches."""
    return _answer(lambda: f"silent: batches of {int(Local(batch=True).batch)} example")


def trap_true_for_the_rate() -> str:
    """Local(lr=True)."""
    return _answer(lambda: f"silent: trained at a rate of 1, {len(_rounds(Local(True)))} rounds")


def trap_true_for_workers() -> str:
    """workers(clients, True), to have as many as there are cores."""

    def use() -> str:
        with workers(_clients(), True) as team:
            return f"silent: {len(team.members)} process"

    return _answer(use)


def trap_half_a_seed() -> str:
    """Seeds.of(0.5) and Seeds.of(0.9), as two seeds."""

    def use() -> str:
        a, b = (
            _rounds(given={"seeds": Seeds.of(seed)}, cohort=2)[-1]  # type: ignore[arg-type]
            for seed in (0.5, 0.9)
        )
        same = a.server["params"]["weight"].equal(b.server["params"]["weight"])
        return f"silent: two seeds, {'one run' if same else 'two runs'}"

    return _answer(use)


def trap_a_parameter_is_missing() -> str:
    """Federation(clients, {"weight": w}, ...) for a network that has a bias as well."""

    def use() -> str:
        given = {"params": {"weight": torch.zeros(3, 4)}}
        names = sorted(_rounds(given=given)[-1].server["params"])
        return f"silent: trained {names} alone"

    return _answer(use)


def trap_a_parameter_of_another_shape() -> str:
    """A first bias of shape (1,) where the network's has shape (3,)."""

    def use() -> str:
        given = {"params": {"weight": torch.zeros(3, 4), "bias": torch.zeros(1)}}
        shape = tuple(_rounds(given=given)[-1].server["params"]["bias"].shape)
        return f"silent: trained one bias {shape} for all three classes"

    return _answer(use)


def trap_text_that_means_no() -> str:
    """pals_weights(..., normalise_target="no")."""

    def use() -> str:
        made = pals_weights([[1, 2]], [20, 80], ess=0.5, normalise_target="no")  # type: ignore[arg-type]
        return f"silent: the target was divided by its sum, distance {made.distance:.2f}"

    return _answer(use)


def trap_text_that_freezes() -> str:
    """Model(net, freeze_norm="no")."""

    def use() -> str:
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model = Model(net, freeze_norm="no")  # type: ignore[arg-type]
        return f"silent: BatchNorm is {'frozen' if model.freeze_norm else 'free'}"

    return _answer(use)


def trap_text_times_a_term() -> str:
    """ "2" * CrossEntropy()."""
    return _answer(lambda: f"silent: {('2' * CrossEntropy())!r}")  # type: ignore[operator]


def trap_one_name_for_a_list_of_names() -> str:
    """unflatten(flat, "params")."""

    def use() -> str:
        flat = flatten({"params": {"weight": torch.zeros(2)}})
        return f"silent: parts {sorted(unflatten(flat, 'params'))}"

    return _answer(use)


def trap_control_of_a_right_use() -> str:
    """A run as it should be."""
    return _answer(lambda: "right" if len(_rounds(cohort=2, backend=loop)) == 3 else "silent: lost")
