"""A client's gradient: by one pass over its data, or from the distance of its steps."""

from __future__ import annotations

from typing import Any

import torch

from fedshift.client.gradients import pass_gradient, travelled_gradient
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy
from fedshift.client.oracles import Sam, Shift
from fedshift.data import Plan
from fedshift.model import Model
from fedshift.tree import Params
from support.by_hand import THREE, max_difference, quadratic_federation, quadratic_model
from support.federations import double, make_federation


def test_a_pass_gives_the_gradient_of_all_data(mlp: Model) -> None:
    """In pieces of unequal size; with decay and SAM as in local steps; 0 for frozen parts."""
    client = double(make_federation(mlp)).clients[1]
    params = double(make_federation(mlp)).params

    def gradient(batch: int, **options: Any) -> Params:
        phase = Local(batch=batch, **options)
        plan = phase.plan(23, 1, torch.Generator().manual_seed(0))
        return pass_gradient(phase, mlp, CrossEntropy(), params, {}, {}, client, plan)

    whole = gradient(23)
    assert max_difference(gradient(5), whole) < 1e-14
    decayed = gradient(5, decay=0.5)
    assert max_difference(decayed, {k: v + 0.5 * params[k] for k, v in whole.items()}) < 1e-14
    assert max_difference(gradient(23, oracles=(Sam(0.1),)), whole) > 1e-4
    only = gradient(5, only=("head",))
    assert max_difference({k: v for k, v in only.items() if k.startswith("head")}, whole) < 1e-14
    assert all(not only[k].any() for k in only if k.startswith("body"))


def test_no_step_gives_no_gradient() -> None:
    """A client without examples: (theta - y) / (lr Q) - shift would be - shift."""
    tree = {"v": torch.ones(3)}
    empty = Plan(torch.zeros(2, 4).long(), torch.zeros(2, 4), torch.tensor(0.1).double())
    assert not travelled_gradient(tree, tree, tree, empty)["v"].any()
    taken = empty._replace(weight=torch.ones(2, 4))
    assert torch.equal(travelled_gradient(tree, tree, tree, taken)["v"], -tree["v"])


def test_the_correction_is_added_to_the_gradient() -> None:
    """Shift is outermost: g(y) - c_i + c, whatever oracles make g."""
    model, federation = quadratic_model(), quadratic_federation((1, 1, 1), (5.0, 5.0))
    by = {"weight": torch.tensor([[3.0, -1.0]]).double()}
    local = Local(lr=0.1, batch=1, oracles=(Sam(0.5),))
    plan = local.plan(1, 1, torch.Generator().manual_seed(0))
    context = {"client": {"id": torch.tensor(0)}}
    data, start = federation.clients[0], federation.params
    plain = local(model, THREE, start, {}, context, data, plan).params["weight"]
    moved = local(model, THREE, start, {}, context, data, plan, Shift(by)).params["weight"]
    assert float((moved - (plain - 0.1 * by["weight"])).abs().max()) < 1e-15
