"""What every method costs relative to FedAvg: `python benchmarks/methods.py [--quick]`.

On W2 (an MLP 784-200-10, clients of 600 examples, 10 steps of batch 32), round 2, one client after
the other on one thread. Beside each ratio stands the work that the method's equations demand, in
passes over examples: forward 1, backward 2. A phase that trains the classifier alone needs no
gradient of the body, and counts as forward. What is less than a pass (terms over the parameters,
the server's programme) counts as nothing; it is in the ratio. `feddrm`, `fedetf` and `fedgela` are
beside FedAvg on their networks.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import statistics
import time
from collections.abc import Callable

import results
import torch

from fedshift import recipes
from fedshift.algorithms.method import Method
from fedshift.client.local import Local
from fedshift.client.oracles import Sam
from fedshift.data import client_data, register
from fedshift.engine.run import Federation, play_round, start
from fedshift.kernels.allocator import keep_memory
from fedshift.model import Model, build
from fedshift.models.dense import Mlp, routed_mlp
from fedshift.models.etf import with_etf
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator

SHAPE, CLASSES, EXAMPLES = (1, 28, 28), 10, 600
LOCAL = Local(lr=0.05, steps=10, batch=32)
TARGET = (0.5, 0.5, *(0.0,) * (CLASSES - 2))
OPTIONS = {"fedpals": {"ess": 0.6}}
# Their first rounds fit densities and train nothing; there is no ratio to a round of training.
LEFT_OUT = ("feddisk", "made")
# Passes over an example: forward and backward, but for phases that only look, and the classifier's.
BOTH, FORWARD = 3.0, 1.0
LOOKS = {"risk": FORWARD, "statistics": 2 * FORWARD}
# Beyond the phases: passes of the model received, and of the client's last one (MOON).
EACH_STEP = {
    "moon": 2 * FORWARD, "moon_uniform": 2 * FORWARD, "fedntd": FORWARD, "fedvls": FORWARD,
}  # fmt: skip


def demanded(name: str, algorithm: Method) -> float:
    """Passes over examples that a client's round takes by the method's equations."""
    total = 0.0
    for key, phase in algorithm.at(2).phases().items():
        seen = phase.batch * phase.steps if phase.steps else (phase.epochs or 0) * EXAMPLES
        each = LOOKS.get(key, FORWARD if phase.only == ("head.",) else BOTH)
        each *= 2 if any(isinstance(one, Sam) for one in phase.oracles) else 1
        total += seen * (each + (EACH_STEP.get(name, 0.0) if key.startswith("train") else 0.0))
    return total


def federation_of(model: Model, count: int) -> Federation:
    """Clients of three labels with random inputs."""
    source = generator(0, "benchmark", "methods")
    clients = [
        client_data(
            torch.randn(EXAMPLES, *SHAPE, generator=source),
            (i + torch.randint(3, (EXAMPLES,), generator=source)) % CLASSES,
            i,
        )
        for i in range(count)
    ]
    return Federation(clients, *model.init(), register(clients, CLASSES), Seeds.of(0))


def second_round(algorithm: Method, federation: Federation) -> Callable[[], object]:
    """Round 2, to be played again and again; round 1 often lacks what a method looks back at."""
    everyone, first = torch.arange(len(federation.clients)), start(algorithm, federation)
    one = play_round(algorithm, federation, first.server, {}, everyone, 1)
    return lambda: play_round(algorithm, federation, one.server, one.states, everyone, 2)


def seconds(*rounds: Callable[[], object], repeat: int) -> list[float]:
    """Medians, the rounds taking turns."""
    times: list[list[float]] = [[] for _ in rounds]
    for _ in range(repeat):
        for play, taken in zip(rounds, times, strict=True):
            began = time.perf_counter()
            play()
            taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in times]


def measured(count: int, repeat: int) -> list[dict[str, object]]:
    """A row per recipe: its round over FedAvg's, and the work demanded over FedAvg's."""
    plain = build(lambda: Mlp(SHAPE, (200,), CLASSES), seed=0)
    routed = build(lambda: routed_mlp(SHAPE, (200,), CLASSES, count), seed=0)
    fixed = build(lambda: with_etf(Mlp(SHAPE, (200,), CLASSES)), seed=0)
    rows: list[dict[str, object]] = []
    for one in recipes.recipes():
        if one.name in LEFT_OUT:
            continue
        model = routed if one.traits.router else fixed if one.traits.fixed_head else plain
        setting = Setting(model, TARGET, LOCAL, rounds=10_000, clients=count, shape=SHAPE)
        base, algorithm = recipes.fedavg(setting), one.make(setting, **OPTIONS.get(one.name, {}))
        federation = federation_of(model, count)
        fedavg, spent = seconds(
            second_round(base, federation), second_round(algorithm, federation), repeat=repeat
        )
        work = demanded(one.name, algorithm) / demanded("fedavg", base)
        rows.append(
            {"method": one.name, "ratio": spent / fedavg, "demanded": work, "seconds": spent}
        )
        print(f"{one.name:20} {spent / fedavg:6.2f}x FedAvg, demanded {work:5.2f}x", flush=True)
    return rows


def main() -> None:
    options = results.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    keep_memory()
    count, repeat = (6, 1) if options.quick else (20, 5)
    figures = {"clients": count, "rows": measured(count, repeat), "left_out": LEFT_OUT}
    results.save(options.out, figures, quick=options.quick)


if __name__ == "__main__":
    main()
