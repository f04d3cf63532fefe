"""The player of the net: methods, weights and experiments as arrays of numbers, by name.

It plays the `fedshift` that Python imports, with the methods of that tree's own
`tests/support/every_method.py`, and uses names that users have. `backend_of` is the one place that
knows inner names. `benchmarks/net.py` calls it for two trees. The golden file is written anew, for
a change that is wanted, by `PYTHONPATH=.:tests python tests/net/play.py --golden`.
"""

from __future__ import annotations

import support.processor  # noqa: F401 - before anything is computed

# isort: split
import argparse
import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from specs import DOORS, SPECS, Numbers, doors, play_spec
from torch import Tensor, nn

import fedshift as fs
from fedshift.data import client_data, register
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from support.every_method import MAKE, WRAP

GOLDEN = Path(__file__).resolve().parent / "golden.json"
CLASSES, FEATURES, TARGET = 5, 8, (0.4, 0.3, 0.2, 0.1, 0.0)
SIZES = (9, 23, 16, 40, 7, 30)
ROUNDS, COHORT = 3, 4
# Methods that need more clients than a cohort has, and those that refuse BatchNorm's buffers.
ALL_CLIENTS = ("krum", "multikrum")
ROBUST = (*ALL_CLIENTS, "fedmedian", "fedtrimmed", "rfa", "rfa under fedpals")
BACKENDS = ("loop", "workers", "stacked", "dense", "flower")


# ------------------------------------------------------------------ methods


class Net(nn.Module):
    """BatchNorm, a head and a branch that tells clients apart: every method trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.Tanh())
        self.head = nn.Linear(12, CLASSES)
        self.router = nn.Linear(12, len(SIZES))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.body(x)
        answers = {"logits": self.head(z), "client_logits": self.router(z)}
        return {"features": z, "client_features": z} | answers


class Headed(Net):
    """The same without a branch, for methods that refuse one."""

    def __init__(self) -> None:
        super().__init__()
        del self.router

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.body(x)
        return {"features": z, "logits": self.head(z)}


def federation(model: fs.Model) -> fs.Federation:
    """Six clients of Gaussian classes; client i holds labels i, i+1 and i+2 (mod K)."""
    source = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=source)
    clients = []
    for i, n in enumerate(SIZES):
        y = (i + torch.randint(3, (n,), generator=source)) % CLASSES
        clients.append(client_data(centres[y] + torch.randn(n, FEATURES, generator=source), y, i))
    return fs.Federation(tuple(clients), *model.init(), register(clients, CLASSES), Seeds.of(0))


def chain() -> nn.Module:
    """What robust methods and the backend dense train."""
    return Mlp((FEATURES,), (10, 7), CLASSES)


def setting(net: Callable[[], nn.Module]) -> Setting:
    """One epoch of batches that do not divide the clients' sizes."""
    torch.manual_seed(0)
    return Setting(
        fs.Model(net()), TARGET, fs.Local(lr=0.1, batch=12), head=("head.",), clients=len(SIZES)
    )


METHODS: dict[str, Callable[[Setting], Any]] = dict(MAKE) | {
    f"{name} around fedpals": lambda s, wrap=wrap: wrap(MAKE["fedpals"](s), s)
    for name, wrap in WRAP.items()
}


def algorithm(name: str, backend: str) -> Any:
    """The method on the first network that it takes."""
    for net in (chain,) if backend == "dense" or name in ROBUST else (Net, Headed):
        try:
            return METHODS[name](setting(net))
        except fs.InputError as e:
            refused = e
    raise refused


@contextlib.contextmanager
def backend_of(name: str, clients: Any) -> Iterator[dict[str, Any]]:
    """What `fs.run` is given to train by this backend. Whoever moves a backend adapts this."""
    if name == "loop":
        yield {}
    elif name == "workers":
        from fedshift.engine.processes.pool import workers

        with workers(clients, 2) as team:
            yield {"backend": team}
    else:
        from fedshift.engine.stacking.stacked import Stacked

        yield {"backend": Stacked(dense=name == "dense")}


def on_flower(method: Any, made: fs.Federation, cohort: int) -> list[Any]:
    """The rounds through Flower's messages, in memory."""
    from fedshift.flower import AlgorithmStrategy, LocalGrid, Site, client_app, play

    first, n = (made.params, made.buffers), len(made.clients)

    def site(i: int) -> Site:
        return Site(method, made.clients[i], made.seeds.batch, first=first)

    strategy = AlgorithmStrategy(
        method, clients=n, classes=CLASSES, seeds=made.seeds, first=first, patience=0.1,
        cohort=cohort,
    )  # fmt: skip
    grid = LocalGrid(client_app(site, open_states=True), n)
    return list(play(strategy, grid, ROUNDS, states=lambda t: t == ROUNDS))


def play_method(name: str, backend: str = "loop", rounds: int = ROUNDS) -> Numbers:
    """Server, states and the rounds' numbers of a method after its rounds."""
    method = algorithm(name, backend)
    made = federation(method.model)
    cohort = len(SIZES) if name in ALL_CLIENTS else COHORT
    if backend == "flower":
        played = on_flower(method, made, cohort)
    else:
        with backend_of(backend, made.clients) as given:
            played = list(fs.run(method, made, rounds, cohort=cohort, **given))
    end = played[-1]
    numbers = {f"{part}/{k}": v for part, tree in end.server.items() for k, v in tree.items()}
    for i in sorted(end.states):
        for part, tree in end.states[i].items():
            numbers |= {f"{part} of clients/{i} {k}": v for k, v in tree.items()}
    return {k: v.detach().numpy() for k, v in numbers.items()} | {
        "rounds/loss": np.array([r.loss for r in played]),
        "rounds/weights": np.concatenate([r.weights.double().numpy() for r in played]),
        "rounds/trained": np.array([i for r in played for i in (*r.trained, -1)]),
    }


# ------------------------------------------------------------------ weights

FORMS: tuple[Callable[[np.random.Generator, int], dict[str, Any]], ...] = (
    lambda rng, m: {"lam": 0.0},
    lambda rng, m: {"lam": float(10 ** rng.uniform(-3, 5))},
    lambda rng, m: {"ess": float(rng.uniform(0.1, 0.95))},
    lambda rng, m: {
        "lam": float(10 ** rng.uniform(0, 4)), "cap": float(min(1, rng.uniform(1.2, 4) / m))
    },
    lambda rng, m: {"lam": 0.0, "cap": float(min(1, rng.uniform(1.2, 4) / m))},
    lambda rng, m: {"lam": float(10 ** rng.uniform(-1, 3)), "fidelity": "norm"},
    lambda rng, m: {"ess": float(rng.uniform(0.1, 0.8)), "fidelity": "norm"},
    lambda rng, m: {"cost": rng.uniform(1e-4, 1e-2, m)},
)  # fmt: skip
KINDS = ("dirichlet", "sparse", "near")


def table(rng: np.random.Generator, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Counts [M, K] and a target [K]; "near": clients less than 1e-3 apart."""
    k, m = int(rng.integers(2, 12)), int(rng.integers(2, 40))
    if kind == "dirichlet":
        shares = rng.dirichlet(np.full(k, rng.choice([0.05, 0.3, 1, 10])), m)
    elif kind == "sparse":
        shares = np.zeros((m, k))
        for row in shares:
            row[rng.choice(k, min(k, int(rng.integers(1, 4))), replace=False)] = 1
    else:
        apart = 10.0 ** -rng.integers(3, 6) * rng.normal(size=(m, k))
        shares = np.abs(rng.dirichlet(np.ones(k)) + apart)
    shares = shares / shares.sum(1, keepdims=True)
    sizes = rng.integers(10**5, 10**7, m) if kind == "near" else rng.integers(5, 3000, m)
    counts = np.stack([rng.multinomial(n, s) for n, s in zip(sizes, shares, strict=True)]) * 1.0
    if rng.random() < 0.2:
        counts[rng.integers(m)] = counts[0]
    if rng.random() < 0.6:
        target = rng.dirichlet(np.full(k, rng.choice([0.1, 1, 5])))
    else:
        target = (counts / counts.sum(1, keepdims=True)).T @ rng.dirichlet(np.ones(m))
    return counts, target / target.sum()


def play_weights(i: int) -> Numbers:
    """Problem i: its weights, and whether they are certified."""
    rng = np.random.default_rng([54, i])
    counts, target = table(rng, KINDS[i % 3])
    solved = fs.pals_weights(counts, target, **FORMS[i // 3 % len(FORMS)](rng, len(counts)))
    assert not (solved.certified and abs(solved.weights.sum() - 1) > 1e-9)
    return {"weights": solved.weights, "certified": np.array([solved.certified])}


def problem(i: int) -> str:
    """Its name, by the kind of table and the options."""
    rng = np.random.default_rng([54, i])
    counts, _ = table(rng, KINDS[i % 3])
    given = FORMS[i // 3 % len(FORMS)](rng, len(counts))
    return f"{i} {KINDS[i % 3]} {' '.join(k if np.any(v) else f'{k}=0' for k, v in given.items())}"


# ------------------------------------------------------------------ all of them


def groups(problems: int = 2000) -> dict[str, dict[str, Callable[[], Numbers]]]:
    """Group -> name -> what plays it."""
    made: dict[str, dict[str, Callable[[], Numbers]]] = {
        f"methods {backend}": {
            name: lambda name=name, backend=backend: play_method(name, backend) for name in METHODS
        }
        for backend in BACKENDS
    }
    made |= {
        f"specs {door}": {
            name: lambda name=name, door=door: play_spec(name, door)
            for name in SPECS
            if door in doors(name)
        }
        for door in DOORS
        if door != "flower"
    }
    made["weights"] = {problem(i): lambda i=i: play_weights(i) for i in range(problems)}
    return made


def attempt(play: Callable[[], Numbers]) -> Numbers:
    """What it plays, or the kind of error that it raises."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return play()
        except Exception as e:
            return {f"error/{type(e).__name__}: {str(e)[:160]}": np.zeros(1)}


def digest(numbers: Numbers) -> dict[str, list[float]]:
    """Part -> [norm, a projection that tells the places of entries apart], for the golden file."""
    parts: dict[str, list[np.ndarray]] = {}
    for name in sorted(numbers):
        part = name if name.startswith("error") else name.partition("/")[0]
        parts.setdefault(part, []).append(np.asarray(numbers[name], np.float64).ravel())
    digests = {}
    for part, arrays in parts.items():
        v = np.nan_to_num(np.concatenate(arrays), nan=-7.0)
        if part == "rounds" or part.startswith("summary") or part.endswith(".csv"):
            v = np.arcsinh(100 * v)  # else the largest column, as the ESS, would hide the others
        digests[part] = [
            float(f"{x:.12g}")
            for x in (np.linalg.norm(v), v @ np.cos(0.7 + 1.3 * np.arange(len(v))))
        ]
    return digests


def unlike(
    now: dict[str, list[float]], golden: dict[str, list[float]], group: str = ""
) -> set[str]:
    """The parts that are absent in one of them, or farther apart than the tolerance x norm."""
    tolerance = 1e-9 if group == "weights" else 1e-5
    return {
        part for part in now.keys() | golden.keys()
        if part not in now or part not in golden
        or np.abs(np.subtract(now[part], golden[part])).max() > tolerance * (golden[part][0] + 1e-3)
    }  # fmt: skip


def write_golden() -> None:
    """The golden file anew; numbers that are equal to the tolerance stay as they were written."""
    import test_net

    before = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    golden: dict[str, dict[str, Any]] = {}
    for group, plays in test_net.cases().items():
        golden[group] = {}
        for name, play in plays.items():
            now, old = digest(attempt(play)), before.get(group, {}).get(name, {})
            golden[group][name] = old if old and not unlike(now, old, group) else now
    GOLDEN.write_text(json.dumps(golden, indent=0).replace("\n", " ").replace("}, ", "},\n") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", help="beginnings of names of groups")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--golden", action="store_true")
    asked = parser.parse_args()
    if asked.golden:
        write_golden()
        return
    chosen = {
        f"{group}|{name}": attempt(play)
        for group, each in groups(asked.problems).items()
        if any(group.startswith(g) for g in asked.groups or [""])
        for name, play in each.items()
    }
    np.savez(asked.out, **{f"{n}|{k}": v for n, made in chosen.items() for k, v in made.items()})


if __name__ == "__main__":
    main()
