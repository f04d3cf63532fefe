"""Every recipe against every clause of the contract in `algorithms/method.py`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fedshift import recipes
from fedshift.client.local import plan_all
from fedshift.data import ClientData, Plan
from fedshift.engine.backends import Job, Reply, Stage, loop
from fedshift.engine.run import Round, run, start
from fedshift.engine.storage.checkpoint import read_checkpoint, write_checkpoint
from fedshift.errors import TrainingError
from fedshift.model import Model
from fedshift.recipes import Setting, one_model
from fedshift.tree import Parts, flatten, sub
from support.every_method import MAKE, ROUNDS, Make, methods_of
from support.federations import TARGET, double, make_clients, make_federation, one_job
from support.rounds import everything, last

pytestmark = pytest.mark.routed

each = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def leaves(value: Any) -> list[torch.Tensor]:
    """All tensors in nested dictionaries and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value
    return [t for child in children if isinstance(child, dict | tuple | torch.Tensor)
            for t in leaves(child)]  # fmt: skip


def floats(pair: tuple[Parts, Parts]) -> tuple[Parts, Parts]:
    """Two trees in float64, with flags and ids, so that they can be subtracted."""
    one, two = ({p: {k: v.double() for k, v in t.items()} for p, t in x.items()} for x in pair)
    return one, two


def equal(a: Round, b: Round) -> bool:
    x, y = flatten(everything(a)), flatten(everything(b))
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


class Whole(NamedTuple):
    """The last round of a method's run, and whether torch's own generator stayed as it was."""

    end: Round
    untouched: bool


WHOLE: dict[tuple[Make, int | None], Whole] = {}


def whole(make: Make, setting: Setting, cohort: int | None = None) -> Whole:
    """The run with which tests compare theirs, trained once for all of them."""
    if (make, cohort) not in WHOLE:
        state = torch.random.get_rng_state()
        end = last(run(make(setting), make_federation(setting.model), ROUNDS, cohort=cohort))
        WHOLE[make, cohort] = Whole(end, torch.equal(state, torch.random.get_rng_state()))
    return WHOLE[make, cohort]


def test_all_recipes_are_covered() -> None:
    rows = {name.split()[0] for name in MAKE}
    for name in recipes.__all__:
        assert name in rows, f"{name} needs a row in tests/support/every_method.py"


@pytest.mark.few(30)
@each
def test_inputs_are_not_written_to(make: Make, setting: Setting, federated: Any) -> None:
    algorithm, federation = make(setting), federated()
    job = one_job(algorithm, federation)
    before = copy.deepcopy(leaves((job.message, job.state, tuple(job.data))))
    versions = [t._version for t in leaves((job.message, job.state, tuple(job.data)))]
    algorithm.at(1).client_update(*job[1:5])
    after = leaves((job.message, job.state, tuple(job.data)))
    assert [t._version for t in after] == versions
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.few(1)
@each
def test_no_global_generator_is_used(make: Make, setting: Setting) -> None:
    assert whole(make, setting, 4).untouched


@pytest.mark.few(1)
@each
def test_the_same_run_twice_is_the_same(make: Make, setting: Setting, federated: Any) -> None:
    first = whole(make, setting, 4).end
    torch.manual_seed(123)
    again = last(run(make(setting), federated(), ROUNDS, cohort=4))
    other = last(run(make(setting), federated(seed=1), ROUNDS, cohort=4))
    assert equal(first, again)
    assert not equal(first, other)  # the control: another seed is another run


@pytest.mark.few(8)
@each
def test_parts_are_two_levels_of_tensors_of_stable_shape(
    make: Make, setting: Setting, federated: Any
) -> None:
    algorithm, federation = make(setting), federated()
    server = algorithm.init(federation.params, federation.buffers, federation.table)
    job = one_job(algorithm, federation)
    update, changed = algorithm.at(1).client_update(*job[1:5])
    for parts in (server, job.message, job.state, update, changed):
        for tree in parts.values():
            assert all(isinstance(v, torch.Tensor) for v in tree.values())
    assert changed.keys() <= job.state.keys()
    played = last(run(algorithm, federation, 1)).server
    old, new = flatten(server), flatten(played)
    assert {k: (v.shape, v.dtype) for k, v in old.items()} == {
        k: (v.shape, v.dtype) for k, v in new.items()
    }


@pytest.mark.few(1)
@each
def test_order_of_replies_is_irrelevant(make: Make, setting: Setting, federated: Any) -> None:
    def backwards(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        return iter(list(loop(stage, jobs))[::-1])

    turned = last(run(make(setting), federated(), ROUNDS, backend=backwards))
    assert equal(whole(make, setting).end, turned)


@pytest.mark.few(1)
@each
def test_padded_rows_change_nothing(make: Make, setting: Setting, federated: Any) -> None:
    def padded(c: ClientData) -> ClientData:
        x = torch.cat([c.x, torch.full((7, c.x.shape[1]), 1e3)])
        y, w = torch.cat([c.y, torch.zeros(7).long()]), torch.cat([c.w, torch.zeros(7)])
        return ClientData(x, y, w, c.id)

    clients, plain = make_clients(), whole(make, setting).end
    more = last(run(make(setting), federated(tuple(map(padded, clients))), ROUNDS))
    # What a client keeps for each example has an entry for padding, too, and that one is 0.
    for i, state in plain.states.items():
        for part, tree in state.items():
            arrays = more.states[i][part]
            for name in (k for k, v in tree.items() if arrays[k].shape != v.shape):
                real, rest = arrays[name].split([clients[i].y.numel(), 7])
                assert not rest.any()
                arrays[name] = real
    assert equal(plain, more)


@pytest.mark.few(1)
@each
def test_padding_steps_change_nothing(make: Make, setting: Setting, federated: Any) -> None:
    """Plans brought to equal shapes, as stacked clients need, against plans cut to size."""

    def stretched(plan: Plan) -> Plan:
        rows = torch.cat([plan.rows, torch.zeros(3, plan.rows.shape[1]).long()])
        return Plan(
            rows, torch.cat([plan.weight, torch.zeros(3, plan.rows.shape[1])]), plan.lr, None
        )

    algorithm, federation = make(setting), double(federated())
    job = one_job(algorithm, federation)

    def difference(plans: dict[str, Plan]) -> float:
        """The distance of updates and states by these plans from those by the given plans."""
        pairs = zip(
            algorithm.at(1).client_update(*job[1:5]),
            algorithm.at(1).client_update(job.message, job.state, job.data, plans),
            strict=True,
        )
        gaps = [sub(flatten(a), flatten(b)) for a, b in map(floats, pairs)]
        return max(float(gap.abs().max()) for tree in gaps for gap in tree.values())

    plans = {k: stretched(p) for k, p in job.plans.items()}
    assert difference(plans) < 1e-14
    wrong = {k: p._replace(weight=torch.ones_like(p.weight)) for k, p in plans.items()}
    assert difference(wrong) > 1e-4


@pytest.mark.few(1)
@each
def test_saved_and_read_in_the_middle(
    make: Make, setting: Setting, federated: Any, tmp_path: Path
) -> None:
    algorithm, federation = make(setting), federated()
    through = whole(make, setting, 4).end
    write_checkpoint(tmp_path, last(run(algorithm, federation, 1, cohort=4)), {})
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert equal(through, last(run(algorithm, federation, ROUNDS, cohort=4, after=saved.round)))
    lost = start(algorithm, federation)._replace(t=saved.round.t)
    assert not equal(through, last(run(algorithm, federation, ROUNDS, cohort=4, after=lost)))


@pytest.mark.few(30)
@each
def test_what_leaves_a_client_is_declared(make: Make, setting: Setting, federated: Any) -> None:
    algorithm = make(setting)
    update, _ = algorithm.at(1).client_update(*one_job(algorithm, federated())[1:5])
    assert update.keys() <= set(algorithm.reveals())
    assert set(update["report"]) == {"id", "loss"}


@pytest.mark.few(8)
@each
def test_a_client_that_diverges_is_named(make: Make, setting: Setting, federated: Any) -> None:
    clients = list(make_clients())
    algorithm, federation = make(setting), federated(tuple(clients))
    clients[3].x.fill_(float("nan"))  # in place: such clients are refused when given
    weights = algorithm.weigh(
        algorithm.init(federation.params, {}, federation.table), torch.arange(6)
    )
    if weights[3] == 0:  # a client without weight cannot do harm
        assert torch.isfinite(
            last(run(algorithm, federation, 1)).server["params"]["head.bias"]
        ).all()
        return
    with pytest.raises(TrainingError, match="client 3 sent non-finite numbers"):
        last(run(algorithm, federation, 1))


# FedDyn's theta is the mean of the clients' models minus h / alpha, also for one client: its laws
# are in test_feddyn_fednova.py. Methods with models of the clients' own have laws of theirs.
SINGLE = [k for k in MAKE if k.split()[0] in methods_of(one_model) and k != "feddyn"]


@pytest.mark.few(2)
@pytest.mark.parametrize("make", [pytest.param(MAKE[k], id=k) for k in SINGLE])
def test_one_client_is_centralised_training(make: Make, setting: Setting, mlp: Model) -> None:
    """theta after each round is plain training on the same batches, then the server's step."""
    method: Any = make(setting)
    algorithm = getattr(method, "inner", method)  # weights around a method: one client has all
    federation = double(make_federation(mlp, make_clients(sizes=(37,))))
    data, params = federation.clients[0], federation.params
    memory, moments = algorithm.objective.remember(params, {}, data), algorithm.server.init(params)
    for t in (1, 2):
        context = {**memory, "anchor": params, "anchor_buffers": {}}
        plan = plan_all(algorithm.phases(), data, t, 0, 0)["train0"]
        end = algorithm.local(mlp, algorithm.objective, params, {}, context, data, plan).params
        memory = algorithm.objective.remember(end, {}, data)
        params, moments = algorithm.server(params, sub(end, params), moments)
    got = last(run(method, federation, 2)).server["params"]
    assert max(float((got[k] - params[k]).abs().max()) for k in params) < 1e-14


@pytest.mark.parametrize("name", recipes.__all__)
def test_recipes_say_what_they_are(name: str) -> None:
    entry = recipes.recipe(name)
    assert entry.summary.endswith("."), f"the docstring of {name} begins with a sentence"
    assert entry.reference, f'the docstring of {name} needs a line "Reference: ..."; yours: "ours"'
    assert all(p.default is not inspect.Parameter.empty for p in entry.options.values())


def test_dropout_draws_from_the_plan(federated: Any) -> None:
    """Two runs are equal, the global generator stays as it was, and dropout does drop."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.Dropout(0.5), torch.nn.Linear(20, 5))
    results = []
    for model in (Model(net), Model(net), Model(torch.nn.Sequential(net[0], net[2]))):
        before = torch.random.get_rng_state()
        federation = make_federation(model)
        done = last(run(recipes.fedavg(Setting(model, TARGET)), federation, 2)).server["params"]
        assert torch.equal(before, torch.random.get_rng_state())
        torch.manual_seed(5)
        results.append(list(done.values()))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])
