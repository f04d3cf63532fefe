"""Chains of linear layers without autograd: the loop's result up to rounding, or a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.method import is_elementwise
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy
from fedshift.client.oracles import Clip, Shift
from fedshift.data import plan_phase
from fedshift.engine.backends import loop
from fedshift.engine.checks.gate import Gate
from fedshift.engine.dense import phase as module
from fedshift.engine.dense import train
from fedshift.engine.one_by_one import dense
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import InputError, UnfitError
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator
from fedshift.tree import Parts, flatten
from support.chains import AT_ONCE, MOST, REFUSED, TRAINED, gap, may_refuse, with_other_labels
from support.every_method import MAKE, ROUNDS
from support.federations import CLASSES, FEATURES, TARGET, double, make_clients, make_federation
from support.rounds import different, last


class ByVmap(FedAvg):
    """A method with its own `client_update` that does not declare what it does besides training."""

    def client_update(self, *given: Any) -> Any:
        return super().client_update(*given)


@pytest.fixture
def setting() -> Setting:
    """Two hidden layers, an epoch of batches that do not divide the clients' sizes."""
    model = build(lambda: Mlp((FEATURES,), (10, 7), CLASSES), seed=1)
    return Setting(model, TARGET, Local(lr=0.3, batch=12))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [k for k in MAKE if k not in REFUSED])
def test_the_loops_result_but_for_rounding(name: str, setting: Setting) -> None:
    make, federation = MAKE[name], make_federation(setting.model)
    with may_refuse(name):
        assert gap(make, setting, federation, Stacked(dense=True)) < MOST.get(name, 1e-6)
        assert gap(make, setting, double(federation), Stacked(dense=True)) < 1e-12


def test_what_it_trains_it_may_not_refuse() -> None:
    """The control: a row without an expected outcome."""
    assert MAKE.keys() - REFUSED.keys() >= TRAINED
    with may_refuse("a new row"):
        raise UnfitError("it cannot")
    with pytest.raises(UnfitError), may_refuse("fedavg"):
        raise UnfitError("it cannot")


def test_float64_inputs_beside_weights_in_float32(setting: Setting) -> None:
    """As `client_data` makes them: 1 / size must not be rounded to float32 on its way."""
    federation = double(make_federation(setting.model))
    clients = tuple(c._replace(w=c.w.float()) for c in federation.clients)
    federation = replace(federation, clients=clients)
    for backend in (Stacked(dense=True), dense(loop)):
        assert gap(recipes.fedavg, setting, federation, backend) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold I", "ditto", "fedrep"])
def test_momentum_and_decay(name: str, setting: Setting) -> None:
    """Clients with different numbers of steps: a step without a batch must not move them."""
    local = replace(setting.local, lr=0.1, momentum=0.7, decay=0.05)
    federation = double(make_federation(setting.model))
    for backend in (Stacked(dense=True), dense(loop)):
        assert gap(MAKE[name], replace(setting, local=local), federation, backend) < 1e-12


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "reason"), REFUSED.items(), ids=REFUSED)
def test_what_it_is_not_for(name: str, reason: str, setting: Setting) -> None:
    federation = make_federation(setting.model)
    with pytest.raises(InputError, match=reason):
        last(run(MAKE[name](setting), federation, ROUNDS, backend=Stacked(dense=True)))


@pytest.mark.parametrize("bytes_", [1, 3000])
def test_any_number_at_a_time(
    bytes_: int, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOGETHER", bytes_)
    federation = double(make_federation(setting.model))
    assert gap(recipes.scaffold, setting, federation, Stacked(dense=True)) < 1e-12


def test_the_comparison_can_fail(setting: Setting) -> None:
    """With other labels results move by far more than rounding."""
    federation = make_federation(setting.model)
    assert gap(recipes.fedavg, setting, federation, with_other_labels(Stacked(dense=True))) > 1e-3


@pytest.mark.few(2)
@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("name", AT_ONCE)
def test_at_once_is_as_by_vmap(name: str, momentum: float, setting: Setting) -> None:
    """Bit for bit, with parts that stay, parameters that do not move and steps that are padding."""
    setting = replace(setting, local=replace(setting.local, momentum=momentum))
    algorithm, federation = MAKE[name](setting), make_federation(setting.model)
    by_vmap = ByVmap(**{field.name: getattr(algorithm, field.name) for field in fields(algorithm)})
    assert is_elementwise(algorithm.client_update)
    assert not is_elementwise(by_vmap.client_update)

    def played(algorithm: FedAvg, seed: int = 0) -> Any:
        some = replace(federation, seeds=Seeds.of(seed))
        return last(run(algorithm, some, ROUNDS, cohort=4, backend=Stacked(dense=True)))

    one, odd, other = played(algorithm), played(algorithm, 1), played(by_vmap)
    assert not different(one, other)
    assert different(odd, other)


@pytest.mark.few(2)
@pytest.mark.parametrize("only", [(), ("head.bias",)])
@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_a_shift_that_all_clients_share(memory: int, only: Any, setting: Setting) -> None:
    """It has no axis for clients."""
    params = setting.model.init()[0]
    by = {k: torch.full_like(v, 0.1, dtype=torch.float64) for k, v in params.items()}
    shifted = replace(setting.local, only=only, oracles=(Shift(by),))
    federation = double(make_federation(setting.model))
    backend = Stacked(dense=True, memory=memory)
    assert gap(recipes.fedavg, replace(setting, local=shifted), federation, backend) < 1e-12
    plain = last(run(recipes.fedavg(setting), federation, 1))
    other = last(run(recipes.fedavg(replace(setting, local=shifted)), federation, 1))
    assert different(plain, other)


def test_methods_of_several_phases_are_not_at_once(setting: Setting) -> None:
    """The mean over phases would be one over clients, too."""
    phases = (setting.local, replace(setting.local, lr=0.01))

    def make(one: Setting) -> FedAvg:
        return FedAvg(one.model, local=phases)

    federation = make_federation(setting.model)
    assert gap(make, setting, double(federation), Stacked(dense=True)) < 1e-12


def three() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5, bias=False), nn.ReLU(),
        nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 3),
    )  # fmt: skip


@pytest.mark.parametrize("frozen", [(), ("1.", "3.0."), ("4.", "3.1.bias")])
def test_a_step_is_autograds_gradient(frozen: tuple[str, ...]) -> None:
    """theta - lr g of the docstring's equations, without biases, with parts that stay."""
    model = build(three, 3)
    params = {k: v.double() for k, v in model.init()[0].items()}
    data = make_clients(sizes=(7,))[0]
    data = data._replace(x=data.x[:, :6].view(7, 2, 3).double(), y=data.y % 3)
    w = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 1.0]).double()
    local = Local(lr=0.5, batch=7, frozen=frozen)
    plan = plan_phase(7, batch=7, lr=0.5, generator=generator(1), steps=1)
    end = train(local, model, CrossEntropy(), params, {}, {}, data._replace(w=w), plan)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    each = F.cross_entropy(model(leaves, {}, data.x)["logits"], data.y, reduction="none")
    loss = (each * w).sum() / 7
    loss.backward()
    assert abs(float(loss.detach() - end.loss)) < 1e-14
    for k, v in leaves.items():
        if k.startswith(frozen) and frozen:
            assert end.params[k] is params[k]
        else:
            assert float((v.detach() - 0.5 * v.grad - end.params[k]).abs().max()) < 1e-15


class Odd(Mlp):
    """A subclass that does more than the chain says."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x.abs())


class Unused(nn.Module):
    """A parameter that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.more = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.ones(1))

    def chain(self) -> Sequence[nn.Module]:
        return (self.head,)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    net[0].register_forward_hook(lambda module, given, output: 2 * output)
    return net


def tied() -> nn.Module:
    one = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(FEATURES, 6), one, nn.ReLU(), one, nn.Linear(6, CLASSES))


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (lambda: Odd((FEATURES,), (6,), CLASSES), "has Odd"),
        (Unused, "others beside its layers"),
        (hooked, "Linear has hooks"),
        (tied, "share parameters"),
        (lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.ReLU()), "end with a linear"),
        (lambda: nn.Sequential(nn.ReLU(), nn.Linear(FEATURES, CLASSES)), "has ReLU where"),
        (lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)), "Tanh"),
    ],
)
def test_networks_that_are_no_chains(net: Any, reason: str, setting: Setting) -> None:
    """Every backend raises the same error, and no client is dropped."""
    model = build(net, 1)
    algorithm = recipes.fedavg(replace(setting, model=model))
    federation = replace(make_federation(model), gate=Gate(on_bad="drop"))
    for backend in (Stacked(dense=True), dense(loop)):
        with pytest.raises(UnfitError, match=reason):
            last(run(algorithm, federation, 1, backend=backend))


@pytest.mark.parametrize(
    ("local", "reason"),
    [
        (Local(optimizer="adam"), "the local optimizer is adam"),
        (Local(oracles=(Clip(1.0),)), "through Clip"),
    ],
)
def test_steps_that_are_no_plain_sgd(local: Local, reason: str, setting: Setting) -> None:
    algorithm = recipes.fedavg(replace(setting, local=local))
    with pytest.raises(UnfitError, match=reason):
        last(run(algorithm, make_federation(setting.model), 1, backend=dense(loop)))


def test_inputs_of_another_type(setting: Setting) -> None:
    federation = make_federation(setting.model)
    params = {k: v.double() for k, v in federation.params.items()}
    plan = plan_phase(9, batch=5, lr=0.1, generator=generator(1), steps=1)
    given = setting.model, CrossEntropy(), params, {}, {}, federation.clients[0], plan
    with pytest.raises(UnfitError, match="inputs are torch.float32"):
        train(setting.local, *given)


@pytest.mark.slow
def test_workers_give_the_dense_loops_bits(setting: Setting) -> None:
    algorithm, federation = recipes.scaffold(setting), make_federation(setting.model)
    one = last(run(algorithm, federation, 2, backend=dense(loop)))
    with workers(federation.clients, 2) as team:
        two = last(run(algorithm, federation, 2, backend=dense(team)))
        with pytest.raises(UnfitError, match="through Sam"):
            last(run(recipes.fedsam(setting), federation, 1, backend=dense(team)))
    assert all(torch.equal(v, two.server["params"][k]) for k, v in one.server["params"].items())


def inferred(*trees: Parts) -> list[str]:
    """Tensors made in inference mode, which allow no gradient."""
    return [k for parts in trees for k, v in flatten(parts).items() if v.is_inference()]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*AT_ONCE, "fedbabu"])
def test_what_a_round_leaves_is_for_gradients_too(name: str, setting: Setting) -> None:
    """Training at once is in inference mode; its results can be trained by any backend."""
    algorithm, federation = MAKE[name](setting), make_federation(setting.model)
    played = last(run(algorithm, federation, 1, backend=Stacked(dense=True)))
    assert not inferred(played.server, *played.states.values())
    assert last(run(algorithm, federation, 2, backend=loop, after=played)).t == 2


@pytest.mark.parametrize("options", [{}, {"frozen": ("body.1",)}, {"only": ("head.bias",)}])
@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_what_clients_were_sent_stays(name: str, options: dict[str, Any], setting: Setting) -> None:
    """Updates reuse the memory of the trained tensors, not that of the message."""
    setting = replace(setting, local=replace(setting.local, **options))
    algorithm, federation = MAKE[name](setting), make_federation(setting.model)
    before = {k: v.clone() for k, v in federation.params.items()}
    last(run(algorithm, federation, 1, backend=Stacked(dense=True)))
    assert all(torch.equal(v, before[k]) for k, v in federation.params.items())
