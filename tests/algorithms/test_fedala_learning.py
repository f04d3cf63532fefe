"""FedALA: how long mixing weights learn, from which examples."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedshift.algorithms.fedala import FedAla
from fedshift.client.local import Local
from fedshift.client.mixing import Mix, leading, top
from fedshift.client.objectives import CrossEntropy, Term, View
from fedshift.data import Plan
from fedshift.model import Model
from support.by_hand import max_difference
from support.federations import double, make_federation, one_job
from support.mixing import STILL, learn, models, plan_of


@dataclass(frozen=True)
class Counted(Term):
    """Cross-entropy that counts its calls."""

    calls: list[int] = field(default_factory=list)

    def __call__(self, view: View) -> Tensor:
        self.calls.append(len(view.batch.y))
        return CrossEntropy()(view)


def epochs_taken(model: Model, mix: Mix, once: bool) -> int:
    """How many passes a client of 40 examples makes over the 32 that it learns W on."""
    counted = Counted()
    algorithm = FedAla(model, mix, objective=counted, local=Local(lr=STILL, epochs=1, batch=8))
    job = one_job(algorithm, double(make_federation(model)), 3)
    mine, theirs = models(model)
    done = {"history": {"mixed": torch.tensor(once)}}
    state, message = job.state | {"personal": mine} | done, job.message | {"params": theirs}
    algorithm.client_update(message, state, *job[3:5])
    training = 5
    assert sum(counted.calls[:-training]) % 32 == 0
    return sum(counted.calls[:-training]) // 32


def test_the_first_time_goes_on_until_losses_settle(mlp: Model) -> None:
    """Losses that stand still end it after window + 1 epochs, none before; then one a round."""
    assert epochs_taken(mlp, Mix(lr=STILL), once=False) == 11
    assert epochs_taken(mlp, Mix(lr=STILL, window=3), once=False) == 4
    assert epochs_taken(mlp, Mix(lr=5.0, threshold=1e-12), once=False) == 50
    assert epochs_taken(mlp, Mix(lr=5.0, threshold=1e-12, cap=7), once=False) == 7
    assert epochs_taken(mlp, Mix(lr=5.0, threshold=1e-12), once=True) == 1
    settled = epochs_taken(mlp, Mix(lr=1.0, threshold=0.01), once=False)
    assert 11 <= settled < 50


def test_losses_settle_by_their_standard_deviation() -> None:
    mix = Mix(window=3, threshold=0.1)
    flat = [torch.tensor(v) for v in (9.0, 1.0, 1.1, 1.2)]
    assert mix.settled(flat)  # sd 0.0816
    assert not mix.settled(flat[1:])  # no more than the window
    assert not mix.settled([*flat, torch.tensor(1.5)])
    assert not mix.settled([*flat, torch.tensor(float("nan"))])


def test_a_share_of_the_examples(mlp: Model) -> None:
    plan = plan_of(40)
    part = leading(plan, 0.8)
    assert part.sizes == (8, 8, 8, 8)
    assert torch.equal(part.rows, plan.rows[:4])
    odd = leading(plan, 0.55)
    assert odd.sizes == (8, 8, 6)
    assert odd.weight.sum() == 22
    assert leading(plan, 1.0).sizes == plan.sizes
    assert leading(plan_of(1), 0.1).sizes == (1,)
    loose = leading(plan._replace(sizes=None), 0.55)
    assert torch.equal(loose.weight[:3], odd.weight)
    assert not loose.weight[3:].any()
    drawn = Local(epochs=1, batch=8).plan(40, 2, torch.Generator().manual_seed(1))
    assert set(leading(drawn, 0.8).rows.flatten().tolist()) != set(part.rows.flatten().tolist())


def test_padding_does_not_teach_w(mlp: Model) -> None:
    """Padding is not the last batch of an epoch, either."""
    plan = plan_of(40)
    rows = torch.cat([plan.rows, torch.zeros(3, 8).long()])
    weight = torch.cat([plan.weight, torch.zeros(3, 8)])
    ones = {k: torch.ones_like(models(mlp)[0][k]) for k in top(mlp, 1, ("head.",))}
    mix = Mix(threshold=0.02)
    loose = Plan(rows, weight, plan.lr, None)
    assert max_difference(learn(mlp, mix, ones, plan, 50), learn(mlp, mix, ones, loose, 50)) < 1e-14
    wrong = loose._replace(weight=torch.ones_like(weight))
    assert max_difference(learn(mlp, mix, ones, plan, 50), learn(mlp, mix, ones, wrong, 50)) > 1e-4
