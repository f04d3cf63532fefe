"""Buffers that training does not change, and the trained network with all its tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.local_only import LocalOnly
from fedshift.client.local import Local
from fedshift.client.sharing import Share
from fedshift.engine.backends import loop
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.engine.storage.checkpoint import read_checkpoint, write_checkpoint
from fedshift.errors import DivergedError, InputError
from fedshift.model import Model, build
from fedshift.tree import flatten
from support.federations import CLASSES, FEATURES, Normed, make_clients, make_federation
from support.rounds import last

LOCAL = Local(epochs=1, batch=8)


MASK = torch.triu(torch.full((4, 4), -torch.inf), 1)
CONSTANTS = {
    "mask": MASK,
    "nan": torch.tensor([torch.nan, 1.0]),
    "whole": torch.tensor([-1, 2]),
    "large": torch.tensor(2**63 - 1),
    "complex": torch.polar(torch.ones(4), torch.arange(4.0)),
    "bool": torch.tensor([True, False]),
    "uint8": torch.tensor([250], dtype=torch.uint8),
    "uint16": torch.tensor([65535], dtype=torch.uint16),
    "uint32": torch.tensor([2**32 - 1], dtype=torch.uint32),
    "uint64": torch.tensor([-1]).view(torch.uint64),
    "int8": torch.tensor([-3], dtype=torch.int8),
    "float16": torch.tensor([0.1], dtype=torch.float16),
}


class Holding(nn.Module):
    """A network with constants of all kinds."""

    def __init__(self, constants: dict[str, Tensor]) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)
        for name, v in constants.items():
            self.register_buffer(name, v.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]


def same(a: Tensor, b: Tensor) -> bool:
    one, other = (v.contiguous().reshape(-1).view(torch.uint8) for v in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(one, other)


METHODS: dict[str, Callable[[Model], Any]] = {
    "fedavg": lambda m: FedAvg(m, local=LOCAL),
    "private": lambda m: FedAvg(m, local=LOCAL, share=Share(tuple(CONSTANTS))),
    "local": lambda m: LocalOnly(m, local=LOCAL),
    "ditto": lambda m: Ditto(FedAvg(m, local=LOCAL), personal=LOCAL),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", METHODS)
def test_constants_pass(name: str, tmp_path: Path) -> None:
    model = build(lambda: Holding(CONSTANTS), seed=0)
    algorithm, federation = METHODS[name](model), make_federation(model)
    played = last(run(algorithm, federation, 2))
    served = algorithm.model_for(played.server, played.states[0])[1]
    assert all(same(served[k], v) for k, v in CONSTANTS.items())
    write_checkpoint(tmp_path, last(run(algorithm, federation, 1)), {})
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    after = last(run(algorithm, federation, 2, after=saved.round))
    pairs = zip(flatten(played.server).values(), flatten(after.server).values(), strict=True)
    assert all(same(a, b) for a, b in pairs)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["stacked", "workers", "shares", "flower"])
def test_constants_pass_everywhere(kind: str) -> None:
    constants = CONSTANTS
    if kind != "flower":  # whose arrays are NumPy's
        constants = constants | {"rounded": torch.tensor([0.1], dtype=torch.bfloat16)}
    model = build(lambda: Holding(constants), seed=0)
    algorithm, federation = METHODS["fedavg"](model), make_federation(model)
    if kind == "flower":
        pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
        from support.flower_runs import on_flower

        played = on_flower(algorithm, federation, 2)
    elif kind == "stacked":
        played = last(run(algorithm, federation, 2, backend=Stacked()))
    else:
        with workers(federation.clients, 2) as team:
            backend = team.blocks(Stacked()) if kind == "shares" else team
            played = last(run(algorithm, federation, 2, backend=backend))
    assert all(same(played.server["buffers"][k], v) for k, v in constants.items())


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning")
def test_kinds_that_cannot_be_averaged_or_sent_are_refused() -> None:
    for odd in (
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        torch.eye(3).to_sparse(),
    ):
        net = nn.Linear(FEATURES, CLASSES)
        net.register_buffer("odd", odd)
        with pytest.raises(InputError, match='"odd" is '):
            Model(net)
        del net.odd
        net.odd = odd  # as an attribute it may be anything
        assert [*Model(net).init()[1]] == []


@pytest.mark.parametrize("into", [torch.nan, torch.inf, -torch.inf])
def test_a_buffer_that_training_spoils_is_refused(into: float) -> None:
    class Spoiling(Holding):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mask.fill_(into)
            return super().forward(x)

    model = build(lambda: Spoiling({"mask": MASK}), seed=0)
    for method in (METHODS["fedavg"], METHODS["local"]):
        with pytest.raises(DivergedError, match=r'non-finite numbers in ".*buffers/mask"'):
            next(run(method(model), make_federation(model), 1))


def test_sums_of_complex_numbers_keep_both_parts() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.polar(torch.ones(FEATURES), torch.ones(FEATURES)))
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x * self.turn).real + (x * self.turn).imag)  # type: ignore[no-any-return]

    model = build(Turning, seed=0)
    federation = make_federation(model)
    algorithm = FedAvg(model, local=LOCAL)
    sent: dict[int, Tensor] = {}

    def noted(update: Any, jobs: Any) -> Any:
        for reply in loop(update, jobs):
            sent[reply.client] = reply.update["delta"]["turn"].clone()
            yield reply

    after = last(run(algorithm, federation, 1, backend=noted)).server["params"]["turn"]
    n = federation.table["n"] / federation.table["n"].sum()
    mean = sum(float(n[i]) * sent[i].to(torch.complex128) for i in sent)
    assert float((after - federation.params["turn"] - mean).abs().max()) < 1e-6
    assert float(mean.imag.abs().max()) > 1e-3  # type: ignore[union-attr]


class Tied(nn.Module):
    """One matrix in two places, and a scale that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, FEATURES, bias=False)
        self.b = nn.Linear(FEATURES, FEATURES, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(1.5)  # type: ignore[operator]
        return self.head(self.norm(self.b(torch.relu(self.a(x)))) * self.scale)  # type: ignore


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "make",
    [
        Tied,
        Normed,
        lambda: nn.Sequential(weight_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES)),
        lambda: nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES)
        ),
    ],
)
def test_the_trained_network_loads(make: Callable[[], nn.Module]) -> None:
    model = build(make, seed=0)
    server = last(run(FedAvg(model, local=Local(batch=7)), make_federation(model), 2)).server
    net, x = model.loaded(server["params"], server["buffers"]), make_clients()[1].x
    out = net(x)
    logits = out["logits"] if isinstance(out, dict) else out
    given = model(server["params"], server["buffers"], x)["logits"]
    assert torch.allclose(logits, given, atol=1e-6)
    assert not torch.allclose(given, model(*model.init(), x)["logits"], atol=1e-2)
    assert not net.training
    assert all(torch.equal(server["params"][k], v) for k, v in net.named_parameters())
    assert all(torch.equal(server["buffers"][k], v) for k, v in net.named_buffers())


def test_what_does_not_fit_is_not_loaded() -> None:
    model = Model(Normed())
    params, buffers = model.init()
    with pytest.raises(InputError, match=r'"head.bias" is \(2,\), the network\'s \(5,\)'):
        model.loaded({**params, "head.bias": torch.zeros(2)}, buffers)
    with pytest.raises(InputError, match='"body.1.running_mean" is missing'):
        model.loaded(params, {})


def test_a_buffer_that_the_pass_replaces_is_kept() -> None:
    """`self.seen = self.seen + 1` is the same as `self.seen += 1`."""

    class Counting(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.in_place, self.head = in_place, nn.Linear(FEATURES, CLASSES)
            self.register_buffer("seen", torch.zeros(()).long())
            self.register_buffer("mean", torch.zeros(CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            z = self.head(x)
            if self.training and self.in_place:
                self.seen += 1
                self.mean.mul_(0.9).add_(0.1 * z.detach().mean(0))
            elif self.training:
                self.seen = self.seen + 1
                self.mean = self.mean * 0.9 + 0.1 * z.mean(0)
            return z  # type: ignore[no-any-return]

    for backend in (loop, Stacked()):
        servers = []
        for in_place in (True, False):
            model = build(partial(Counting, in_place), seed=0)
            algorithm, federation = METHODS["fedavg"](model), make_federation(model)
            servers.append(last(run(algorithm, federation, 2, backend=backend)).server)
            assert int(model.net.seen) == 0
        one, two = (server["buffers"] for server in servers)
        assert int(one["seen"]) == int(two["seen"]) == 10  # of the client of 40 examples
        assert torch.allclose(one["mean"], two["mean"])
        assert float(one["mean"].abs().max()) > 1e-3
