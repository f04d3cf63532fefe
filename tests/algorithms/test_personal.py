"""Methods that share a body or nothing: FedPer, FedRep, FedBABU, local-only; and step budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.finetune import FineTune
from fedshift.client.local import Local, plan_all
from fedshift.client.objectives import CrossEntropy
from fedshift.client.sharing import Share
from fedshift.engine.run import Federation, Round, run
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.confree import ConFree
from fedshift.tree import Params, split
from support.by_hand import final, max_difference
from support.comparing import same
from support.federations import TARGET, double, make_clients, make_federation, one_job

# Momentum and decay, because both move parameters that are frozen in name only.
HEAVY = Local(lr=0.1, epochs=1, batch=8, momentum=0.9, decay=0.01)


@pytest.fixture
def heavy(mlp: Model) -> Setting:
    """A run of three rounds with momentum and decay."""
    return Setting(mlp, TARGET, HEAVY, rounds=3)


def of_steps(setting: Setting, steps: int = 10) -> Setting:
    return replace(setting, local=replace(setting.local, epochs=None, steps=steps))


def models(algorithm: Algorithm, federation: Federation, played: Round) -> list[Params]:
    """What the clients of a round serve after it."""
    stage = algorithm.at(played.t)
    return [stage.model_for(played.server, played.states[i])[0] for i in range(6)]


def halves(params: Params) -> tuple[Params, Params]:
    """(head, body)."""
    return split(params, ("head.",))


SHARING: dict[str, Callable[[Setting], Algorithm]] = {
    "fedper": recipes.fedper,
    "fedrep": recipes.fedrep,
    "fedrep_drm_repo": lambda s: recipes.fedrep_drm_repo(of_steps(s)),
    "fedbabu": lambda s: recipes.fedbabu(s, tune_rounds=1),
    "fedbabu_drm_repo": lambda s: recipes.fedbabu_drm_repo(of_steps(s), tune_rounds=1),
}


@pytest.mark.parametrize("make", SHARING.values(), ids=SHARING)
def test_no_head_travels(make: Any, heavy: Setting, federated: Any) -> None:
    algorithm, federation = make(heavy), federated()
    job = one_job(algorithm, federation)
    update, _ = algorithm.at(1).client_update(*job[1:5])
    body = {k for k in federation.params if not k.startswith("head.")}
    assert set(job.message["params"]) == set(update["delta"]) == body
    assert final(algorithm, federation, 1).server["params"].keys() == body


def test_fedper_is_fedavg_on_the_body(heavy: Setting, federated: Any, mlp: Model) -> None:
    algorithm, federation = recipes.fedper(heavy), federated()
    assert algorithm == FedAvg(mlp, local=HEAVY, share=Share(("head.",)))
    one, two = final(algorithm, federation, 1), final(recipes.fedavg(heavy), federation, 1)
    body = halves(two.server["params"])[1]
    assert (
        max_difference(one.server["params"], body) == 0
    )  # the first round's heads are still equal
    later, global_ = final(algorithm, federation, 2), final(recipes.fedavg(heavy), federation, 2)
    assert max_difference(later.server["params"], halves(global_.server["params"])[1]) > 1e-4
    served = models(algorithm, federation, later)
    assert max_difference(halves(served[0])[0], halves(served[1])[0]) > 1e-3
    assert max_difference(halves(served[0])[1], halves(served[1])[1]) == 0


def test_fedper_with_one_client_is_fedavg(heavy: Setting, mlp: Model) -> None:
    federation = double(make_federation(mlp, make_clients(sizes=(37,))))
    fedper, plain = recipes.fedper(heavy), recipes.fedavg(heavy)
    one, two = final(fedper, federation, 3), final(plain, federation, 3)
    assert (
        max_difference(fedper.model_for(one.server, one.states[0])[0], two.server["params"]) < 1e-13
    )


def test_fedrep_without_head_phase_is_fedbabus_body(heavy: Setting, federated: Any) -> None:
    body = recipes.fedrep(heavy, head_epochs=0)
    assert body == recipes.fedbabu(heavy, tune_rounds=0)
    assert same(body, recipes.fedbabu(heavy, tune_rounds=1), federated(), 2) == 0
    assert same(body, recipes.fedrep(heavy, head_epochs=1), federated(), 2) > 1e-4


def test_fedrep_without_body_phase_never_moves_the_body(heavy: Setting, federated: Any) -> None:
    algorithm, federation = recipes.fedrep(heavy, head_epochs=2), federated()
    head, _ = algorithm.local  # type: ignore[misc]
    frozen = final(replace(algorithm, local=head), federation, 3)
    assert max_difference(frozen.server["params"], halves(federation.params)[1]) == 0
    assert max_difference(frozen.states[0]["private"], halves(federation.params)[0]) > 1e-2
    assert same(algorithm, replace(algorithm, local=head), federation, 1) > 1e-3


def test_fedreps_phases_move_one_part_each(heavy: Setting, federated: Any) -> None:
    """Head first on the body received, then the body under that head: bit for bit by hand."""
    algorithm, federation = recipes.fedrep(heavy, head_epochs=2), federated()
    done = final(algorithm, federation, 1)
    data, start = federation.clients[4], federation.params
    plans = plan_all(algorithm.phases(), data, 1, 0, 4)
    assert plans["train0"].steps == 2 * plans["train1"].steps
    phases = list(algorithm.phases().values())
    fitted = phases[0](heavy.model, CrossEntropy(), start, {}, {}, data, plans["train0"]).params
    assert max_difference(halves(fitted)[1], halves(start)[1]) == 0
    assert max_difference(halves(fitted)[0], done.states[4]["private"]) == 0
    end = phases[1](heavy.model, CrossEntropy(), fitted, {}, {}, data, plans["train1"]).params
    assert max_difference(halves(end)[0], halves(fitted)[0]) == 0
    update, _ = algorithm.client_update(*one_job(algorithm, federation, 4)[1:5])
    sent = {k: end[k] - start[k] for k in update["delta"]}
    assert max_difference(update["delta"], sent) == 0
    assert max_difference(sent, {k: torch.zeros_like(v) for k, v in sent.items()}) > 1e-2


def test_clients_not_drawn_keep_their_head(heavy: Setting, federated: Any) -> None:
    first, second = run(recipes.fedrep(heavy), federated(), 2, cohort=3)
    for i in first.trained:
        gap = max_difference(first.states[i]["private"], second.states[i]["private"])
        assert (gap > 0) == (i in second.trained)
    assert set(first.trained) - set(second.trained)


def test_fedbabus_head_does_not_move_in_federated_rounds(heavy: Setting, federated: Any) -> None:
    algorithm, federation = recipes.fedbabu(heavy, tune_rounds=1), federated()
    head, body = halves(federation.params)
    for played in run(algorithm, federation, 2):
        for i, params in enumerate(models(algorithm, federation, played)):
            assert max_difference(halves(params)[0], head) == 0
            assert max_difference(params, models(algorithm, federation, played)[0]) == 0, i
        assert max_difference(played.server["params"], body) > 1e-3


@pytest.mark.parametrize("part", ["head", "body", "full"])
def test_fedbabu_tunes_the_part_that_is_named(part: Any, heavy: Setting, federated: Any) -> None:
    algorithm = recipes.fedbabu(heavy, tune_rounds=1, tune_part=part)
    federation = federated()
    middle = final(algorithm, federation, 2)
    before = models(algorithm, federation, middle)[0]
    after = models(algorithm, federation, final(algorithm, federation, 3, after=middle))
    for params in after:
        pairs = zip(halves(params), halves(before), strict=True)
        assert [max_difference(new, old) == 0 for new, old in pairs] == [
            part == "body",
            part == "head",
        ]


def test_fedbabu_without_tuning_gives_all_the_same(heavy: Setting, federated: Any) -> None:
    algorithm, federation = recipes.fedbabu(heavy, tune_rounds=0), federated()
    done = final(algorithm, federation, 2)
    assert all(max_difference(p, models(algorithm, federation, done)[0]) == 0
               for p in models(algorithm, federation, done))  # fmt: skip


def test_fedbabu_tunes_with_private_statistics(normed: Model) -> None:
    """The body's running statistics are the server's until tuning, with its parameters."""
    setting = Setting(normed, TARGET, replace(HEAVY, batch=7), rounds=2)
    algorithm, federation = recipes.fedbabu(setting, tune_rounds=1), make_federation(normed)
    done = final(algorithm, federation, 2)
    name = "body.1.running_mean"
    assert name in done.server["buffers"]
    _, buffers = algorithm.at(2).model_for(done.server, done.states[1])
    assert float((buffers[name] - done.server["buffers"][name]).abs().max()) > 1e-3


def test_local_only_does_not_depend_on_others(heavy: Setting, federated: Any) -> None:
    """The same model whatever other clients there are: plain SGD on the client's own batches."""
    algorithm, federation = recipes.local_only(heavy), federated()
    done = final(algorithm, federation, 2)
    clients = federation.clients[:3]
    few = final(algorithm, federated(clients), 2)
    end = federation.params
    for t in (1, 2):
        plan = plan_all(algorithm.phases(), clients[2], t, 0, 2)["personal0"]
        end = HEAVY(heavy.model, CrossEntropy(), end, {}, {}, clients[2], plan).params
    assert max_difference(done.states[2]["personal"], end) == 0
    assert max_difference(few.states[2]["personal"], end) == 0
    assert max_difference(done.states[1]["personal"], end) > 1e-2
    shared = final(recipes.fedavg(heavy), federation, 2)
    assert max_difference(shared.server["params"], end) > 1e-2


def test_local_only_keeps_its_own_statistics(normed: Model) -> None:
    """BatchNorm's statistics go on from round to round, as in one long training."""
    federation, local = make_federation(normed), Local(batch=7)
    algorithm = recipes.local_only(Setting(normed, TARGET, local))
    done, data = final(algorithm, federation, 2), federation.clients[1]
    end, after = federation.params, federation.buffers
    for t in (1, 2):
        plan = plan_all(algorithm.phases(), data, t, 0, 1)["personal0"]
        end, after, _ = local(normed, CrossEntropy(), end, after, {}, data, plan)
    params, buffers = algorithm.model_for(done.server, done.states[1])
    assert max_difference(params, end) == max_difference(buffers, after) == 0
    assert max_difference(buffers, federation.buffers) > 1e-2


def test_local_only_sends_nothing(heavy: Setting, federated: Any) -> None:
    algorithm, federation = recipes.local_only(heavy), federated()
    job = one_job(algorithm, federation)
    update, _ = algorithm.client_update(*job[1:5])
    assert job.message == {}
    assert update.keys() == {"report"}
    assert set(algorithm.reveals()) == {"report", "evaluation", "register"}
    assert final(algorithm, federation, 1).server["params"] == {}


BUDGET: dict[str, Callable[[Setting], Algorithm]] = {
    "fedavgft": lambda s: recipes.fedavgft(s, tune_rounds=1),
    "fedproxft": lambda s: recipes.fedproxft(s, tune_rounds=1),
    "fedsamft": lambda s: recipes.fedsamft(s, tune_rounds=1),
    "ditto": recipes.ditto_drm_repo,
    "fedrep": recipes.fedrep_drm_repo,
    "fedbabu": lambda s: recipes.fedbabu_drm_repo(s, tune_rounds=1),
    "fedper": recipes.fedper,
    "local_only": recipes.local_only,
}


@pytest.mark.parametrize("make", BUDGET.values(), ids=BUDGET)
def test_ten_steps_per_round_in_all(make: Any, heavy: Setting, federated: Any) -> None:
    """The paper's budget, in federated and in tuning rounds, for small and large clients."""
    algorithm = make(of_steps(heavy))
    for t in (1, 3):
        for i in (3, 4):  # 40 examples and 7: more and fewer than ten batches of 8
            plans = plan_all(algorithm.at(t).phases(), federated().clients[i], t, 0, i)
            assert sum(plan.steps for plan in plans.values()) == 10


def test_the_repositorys_splits(heavy: Setting) -> None:
    for steps, expected in ((10, (5, 5)), (7, (3, 4))):
        head, body = recipes.fedrep_drm_repo(of_steps(heavy, steps)).local  # type: ignore[misc]
        assert (head.steps, body.steps) == expected
        assert (head.only, body.frozen) == (("head.",), ("head.",))
    tuned: Any = recipes.fedbabu_drm_repo(replace(of_steps(heavy), rounds=800))
    assert isinstance(tuned, FineTune)
    assert (tuned.after, tuned.tune.only, tuned.tune.steps) == (600, ("head.",), 10)
    for name in ("fedrep_drm_repo", "fedbabu_drm_repo"):
        with pytest.raises(InputError, match=rf"{name} counts steps.*Local\(steps=10"):
            getattr(recipes, name)(heavy)
    with pytest.raises(InputError, match="fedrep_drm_repo gives 1 in 2 .* 1 is too few"):
        recipes.fedrep_drm_repo(of_steps(heavy, 1))


def test_a_frozen_part_of_the_setting_stays_frozen(heavy: Setting) -> None:
    part = replace(heavy, local=replace(HEAVY, frozen=("body.1.bias",)))
    head, body = recipes.fedrep(part).local  # type: ignore[misc]
    assert body.frozen == ("body.1.bias", "head.")
    assert head.frozen == ("body.1.bias",)


HEADED = [recipes.fedper, recipes.fedrep, recipes.fedbabu]


@pytest.mark.parametrize("make", HEADED, ids=lambda m: m.__name__)
def test_a_head_that_does_not_fit_is_refused(make: Any, heavy: Setting) -> None:
    for head in (("haed.",), ("head.", "fc."), ("head", "body"), ()):
        with pytest.raises(InputError, match=r"Setting\.head = .* must match some .* and not all"):
            make(replace(heavy, head=head))
    with pytest.raises(InputError, match=r"body\.1\.weight.*Did you mean \"head\.\w+\"\?"):
        make(replace(heavy, head=("haed.bias",)))


def test_impossible_options_are_refused(heavy: Setting) -> None:
    with pytest.raises(InputError, match="head_epochs must be 0 or more, got -1"):
        recipes.fedrep(heavy, head_epochs=-1)
    with pytest.raises(
        InputError, match='unknown tune_part of fedbabu "haed".*Did you mean "head"'
    ):
        recipes.fedbabu(heavy, tune_part="haed")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"tune_rounds=5 of 3 rounds leave none"):
        recipes.fedbabu(heavy)
    with pytest.raises(InputError, match=r"tune_rounds=200 are the last rounds of the run"):
        recipes.fedbabu_drm_repo(replace(of_steps(heavy), rounds=None))
    part = replace(heavy, local=replace(HEAVY, only=("body.",)))
    for make in (recipes.fedrep, recipes.fedbabu):
        with pytest.raises(InputError, match=r"decides which parameters move; leave out only="):
            make(part)


def test_published_defaults(heavy: Setting) -> None:
    """The values of the publications and their authors' code, copied by hand."""
    head, body = recipes.fedrep(heavy).local  # type: ignore[misc]
    assert (head.epochs, head.only, body.frozen) == (10, ("head.",), ("head.",))
    babu: Any = recipes.fedbabu(replace(heavy, rounds=20))
    assert (babu.after, babu.tune.only, babu.tune.frozen) == (15, (), ())
    pac: Any = recipes.fedpac(heavy)
    assert (pac.fit.lr, pac.fit.epochs, pac.lam, pac.collaborate) == (0.1, 1, 1.0, True)
    slow: Any = recipes.fedpac(replace(heavy, local=replace(HEAVY, lr=0.02)))
    assert (slow.fit.lr, slow.local.lr) == (0.1, 0.02)
    align = recipes.fedas(heavy).align
    assert align is not None
    assert (align.lr, align.batch, align.epochs) == (0.01, 16, 1)
    mix = recipes.fedala(heavy).mix
    assert mix is not None
    assert (mix.lr, mix.layers, mix.share, mix.threshold, mix.window) == (1.0, 1, 0.8, 0.1, 10)
    assert recipes.ditto(heavy).lam == 1.0
    assert recipes.confree(heavy).combine == ConFree(alpha=0.5, normalise=True, scope="tensor")
