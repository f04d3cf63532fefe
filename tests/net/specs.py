"""The experiments of the net, and the doors through which they are played.

An experiment is the dictionary of its file. Each sets what has a default that may change, by BASE.
What it leaves is read from its run folder: tensors of all models, numbers of all tables, and what
the saved result answers to ten rows.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import users_own
from safetensors.numpy import load_file

import fedshift as fs

Numbers = dict[str, np.ndarray]
Spec = dict[str, dict[str, Any]]
BASE: Spec = {
    "data": {"validation": 0.2, "test": 0.2},
    "model": {"name": "mlp", "hidden": [6]},
    "method": {"name": "fedavg"},
    "training": {
        "rounds": 4, "epochs": 1, "batch": 16, "lr": 0.1, "momentum": 0.0, "decay": 0.0,
        "optimizer": "sgd", "precision": "float32", "server_lr": 1.0, "server_momentum": 0.0,
        "schedule": "constant", "evaluate_every": 1, "evaluate_last": 0, "prior": "none",
        "keep": "last", "threads": 1, "on_bad_reply": "stop", "min_clients": 1,
    },
    "seeds": {"run": 0},
}  # fmt: skip
COLUMNS = ("hospital", "age", "ward", "marker", "outcome", "severity", "cough", "fever")
LABEL = {"label": "outcome", "drop": ["severity", "cough", "fever"]}
NUMBER = {"label": "severity", "drop": ["outcome", "cough", "fever"], "kind": "regression"}
SEVERAL = {"label": ["cough", "fever"], "drop": ["outcome", "severity"], "kind": "multilabel"}
MINI: Spec = {
    "data": {"name": "fashion-mnist-mini", "validation": 0.2},
    "shift": {"kind": "sparsity", "labels_per_client": 3, "clients": 6, "target": "drawn"},
    "model": {"name": "linear"},
    "training": {"steps": 2, "rounds": 3, "evaluate_every": 3},
}


def table(label: Mapping[str, Any] = LABEL, target: Any = "north", **tables: Any) -> Spec:
    """An experiment on the table of patients."""
    data = {"source": "patients.csv", "client": "hospital", "target": target, **label}
    return {**tables, "data": data | tables.get("data", {})}


def method(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, **options}


SETS = {"unlabeled": 20, "validation": 0}
CLIENTS = {"target": "clients", "kind": "dirichlet-per-client", "beta": 1.0, "clients": 4}
SPECS: dict[str, Spec] = {
    "fedavg": table(training={"momentum": 0.5, "decay": 0.01, "server_momentum": 0.5}),
    "fedpals": table(method=method("fedpals", ess=0.5)),
    "fedpals chosen": table(
        method=method("fedpals", ess="auto"), selection={"rule": "estimate", "grid": [0, 0.6]}
    ),
    "fedprox at shares": table(
        target={"ill": 0.6, "well": 0.3, "worse": 0.1}, method=method("fedprox", mu=0.3)
    ),
    "feddyn, pooled": table(target="pooled", method=method("feddyn", alpha=0.1)),
    "scaffold, cohorts": table(
        method=method("scaffold", option="II"), training={"cohort": 3, "rounds": 5}
    ),
    "ditto": table(target="clients", method=method("ditto", lam=0.5)),
    "fedper, cohorts": table(target="clients", method=method("fedper"), training={"cohort": 4}),
    "fedpac": table(target="clients", method=method("fedpac")),
    "feddrm": table(
        target="clients", method=method("feddrm"), model={"name": "mlp-projected", "hidden": [8]}
    ),
    "label sets": table(
        target="clients", method=method("labelset_fedavg", mode="private", tune="kl", tune_steps=5),
        server=SETS, data={"validation": 0.0}, training={"cohort": 3},
    ),
    "label sets, public": table(
        target="clients", method=method("labelset_scaffold", mode="public"),
        data={"validation": 0.0},
    ),
    "feddisk": table(
        method=method("feddisk", density_rounds=2, hidden=[6], low=-8.0, high=8.0),
        training={"rounds": 6},
    ),
    "regression": table(NUMBER, training={"lr": 0.05}, method=method("fedadam")),
    "regression, fedpals": table(NUMBER, "clients", method=method("fedpals", ess=0.7, cap=0.5)),
    "several labels": table(SEVERAL, training={"cohort": 4}),
    "several labels, scaffold": table(SEVERAL, "pooled", method=method("scaffold", option="I")),
    "BatchNorm": table(model={"name": "users_own.py:Net"}, training={"cohort": 4}),
    "own method and metric": table(
        model={"name": "users_own.py:Net"}, method=method("users_own.py:make", mu=0.2),
        metrics={"extra": ["users_own.py:brier"]},
    ),
    "drops": table(
        training={"on_bad_reply": "drop", "max_norm": 0.55, "min_clients": 2, "max_gap": 1.0}
    ),
    "ccvr": table(method=method("ccvr_target", virtual=60, ridge=0.1)),
    "corrected": table(training={"prior": "calibrated"}, method=method("fedpals", ess=0.6)),
    "best, cosine": table(
        training={"keep": "best", "schedule": "cosine", "patience": 3, "lr": 0.4}
    ),
    "adam": table(training={"optimizer": "adam", "lr": 0.01}, method=method("moon", mu=0.5)),
    "afl": table(method=method("afl", gamma=0.1), training={"max_weight": 0.3}),
    "rfa under fedpals": table(method=method("rfa", weights="fedpals", ess=0.6)),
    "fedetf": table(
        method=method("fedetf"), model={"name": "mlp", "hidden": [6], "classifier": "etf"}
    ),
    "images": MINI | {"method": method("fedpals", ess="auto"), "selection": {"grid": [0, 0.5]}},
    "images, router": MINI | {
        "shift": CLIENTS | {"transform": "fashion"}, "method": method("feddrm"),
        "model": {"name": "mlp-projected", "hidden": [8]},
    },
    "images, LeNet": MINI | {
        "model": {"name": "lenet"}, "shift": MINI["shift"] | {"noise": 0.3},
        "training": {"steps": 2, "rounds": 2, "evaluate_every": 2},
    },
    "images, label sets": MINI | {
        "shift": {"target": "union", "kind": "label-sets", "clients": 5, "samples": 80},
        "method": method("labelset_fedavg"), "data": MINI["data"] | {"validation": 0.0},
        "server": {"unlabeled": 30},
    },
}  # fmt: skip
# Those that the default run leaves out.
SLOW = ("images, router", "images, LeNet")


def full(name: str) -> Spec:
    """The experiment with all of BASE that its own tables do not set."""
    spec = {key: {**BASE.get(key, {}), **SPECS[name].get(key, {})} for key in BASE | SPECS[name]}
    if "name" in SPECS[name].get("model", {}):
        spec["model"] = SPECS[name]["model"]
    if "steps" in spec["training"]:
        del spec["training"]["epochs"]
    if spec["data"].get("target") == "north" or "shift" in spec:
        spec["data"].pop("test")
    return spec


def patients(path: Path) -> None:
    """A table of six hospitals with other shares of three outcomes, a number and two labels."""
    rows, source = [COLUMNS], random.Random(54)
    for i, hospital in enumerate(("coast", "east", "hill", "lake", "north", "south")):
        for _ in range(24 + 9 * i):
            u = source.random()
            sort = 0 if u < 0.1 + 0.14 * i else 1 if u < 0.9 else 2
            age, marker = source.gauss(50 + 9 * sort, 12), source.gauss(1.2 * sort + 0.1 * i, 1)
            ward = source.choice(["surgery", "medicine", "other"])
            noise = [source.gauss(0, 1) for _ in range(3)]
            outcome = ("ill", "well", "worse")[sort]
            rows.append((hospital, round(age), ward, round(marker, 3), outcome,
                         round(0.03 * age + marker + 0.3 * noise[0], 3),
                         int(marker + noise[1] > 1), int(age + 9 * noise[2] > 55)))  # fmt: skip
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def toml(spec: Spec, name: str = "run") -> str:
    """The experiment's file. JSON writes texts, numbers and lists as TOML does."""
    lines = [f'name = "{name}"']
    for key, values in spec.items():
        lines += ["", f"[{key}]", *(f"{k} = {value(v)}" for k, v in values.items())]
    return "\n".join(lines) + "\n"


def value(v: Any) -> str:
    if isinstance(v, dict):
        return "{" + ", ".join(f"{k} = {value(x)}" for k, x in v.items()) + "}"
    return json.dumps(v)


# ------------------------------------------------------------------ doors


def command(*given: str) -> None:
    """`fedshift ...` in this process."""
    from fedshift.cli import main

    before = sys.argv, [(s, signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)]
    sys.argv = ["fedshift", *given]
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), \
                contextlib.redirect_stderr(null):  # fmt: skip
            main()
    except SystemExit as e:
        if e.code:
            raise RuntimeError(f"fedshift {' '.join(given)}: exit code {e.code}") from e
    finally:
        sys.argv = before[0]
        for number, handler in before[1]:
            signal.signal(number, handler)


def keywords(spec: Spec) -> dict[str, Any]:
    """The arguments of `fs.fit` for an experiment."""
    own = {"users_own.py:Net": users_own.Net, "users_own.py:make": users_own.make}
    net, how = (own.get(spec[key]["name"], spec[key]["name"]) for key in ("model", "method"))
    options = {k: v for k, v in spec["method"].items() if k != "name"}
    data = dict(spec["data"])
    task = fs.Task.from_csv(data.pop("source"), seed=spec["seeds"]["run"], **data)
    given = {k: v for key in ("model", "training", "selection")
             for k, v in spec.get(key, {}).items() if k != "name"}  # fmt: skip
    if "metrics" in spec:
        given["metrics"] = {"brier": users_own.brier}
    return given | {
        "task": task,
        "net": net,
        "method": fs.method(how, **options),
        "seed": spec["seeds"]["run"],
    }


def python(spec: Spec, out: Path) -> None:
    fs.fit(**keywords(spec), folder=out, backend="loop", progress=False, name="run")


def workers(spec: Spec, out: Path) -> None:
    fs.fit(**keywords(spec), folder=out, backend="workers", workers=2, progress=False, name="run")


def resumed(spec: Spec, out: Path) -> None:
    """Interrupted by Ctrl-C in round 2, and gone on with."""

    def stop(numbers: Mapping[str, Any]) -> None:
        if numbers["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
            fs.fit(**keywords(spec), folder=out, callbacks=stop, progress=False, name="run")
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (out / "summary.json").exists()
    fs.fit(**keywords(spec), folder=out, backend="loop", resume=True, progress=False, name="run")


def file(spec: Spec, out: Path, *more: str) -> None:
    Path("e.toml").write_text(toml(spec))
    command("run", "e.toml", "--out", str(out), *more)


def file_of_workers(spec: Spec, out: Path) -> None:
    file(spec, out, "--workers", "2")


def dash_c(spec: Spec, out: Path) -> None:
    """A file of another method, network, seed and training, set right on the command line."""
    Path("c.toml").write_text(toml({
        "data": spec["data"], "method": {"name": "fedavg"}, "model": {"name": "linear"},
        "training": {"rounds": 9, "prior": "target"},
    } | {k: spec[k] for k in ("shift", "server") if k in spec}))  # fmt: skip
    keys = [f"{key}.{k}={value(v)}" for key in spec if key not in ("data", "shift", "server")
            for k, v in spec[key].items()]  # fmt: skip
    command("run", "c.toml", "--out", str(out), *(x for k in keys for x in ("-c", k)))


def flower(spec: Spec, out: Path) -> None:
    file(spec, out, "--engine", "flower-sim", "--actors", "1")


DOORS: dict[str, Callable[[Spec, Path], None]] = {
    "python": python, "file": file, "-c": dash_c, "workers": workers, "resumed": resumed,
    "file, workers": file_of_workers, "flower": flower,
}  # fmt: skip


def one_door(name: str) -> str:
    """The door of the default run: each has its share of the experiments."""
    return doors(name)[[*SPECS].index(name) % len(doors(name))]


def doors(name: str) -> list[str]:
    """The doors that lead to an experiment; only files have data of the library and of a server."""
    quick = [door for door in DOORS if door != "flower"]
    from_python = "source" in SPECS[name]["data"] and "server" not in SPECS[name]
    return quick if from_python else ["file", "-c", "file, workers"]


@contextlib.contextmanager
def project() -> Iterator[Path]:
    """A user's folder, with the table and the Python file."""
    before = Path.cwd()
    with TemporaryDirectory() as place:
        patients(Path(place) / "patients.csv")
        shutil.copy(Path(users_own.__file__), place)
        os.chdir(place)
        try:
            yield Path(place)
        finally:
            os.chdir(before)


def play_spec(name: str, door: str) -> Numbers:
    """All numbers that the experiment leaves behind."""
    spec = full(name)
    with project() as place:
        DOORS[door](spec, place / "out")
        return numbers_in(place / "out", spec)


def numbers_in(folder: Path, spec: Spec) -> Numbers:
    """Tensors and tables of a run folder, and the saved result's answers to ten rows."""
    numbers: Numbers = {}
    for path in sorted(folder.rglob("*.safetensors")):
        numbers |= {f"{path.relative_to(folder)}/{k}": v for k, v in load_file(path).items()}
    for path in sorted(folder.glob("*.csv")):
        rows = pd.read_csv(path)
        for column in rows.select_dtypes("number"):
            numbers[f"{path.name}/{column}"] = rows[column].to_numpy(float)
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("final", "weights", "target", "label_counts", "corrected"):
        found = leaves(summary[key], f"summary {key}")
        numbers |= {k: np.array(v, float) for k, v in found if "bytes" not in k}
    if "source" in spec["data"]:
        net = users_own.Net if spec["model"]["name"] == "users_own.py:Net" else None
        result = fs.load(folder, net=net)
        client = {"client": result.clients[0]} if spec["data"]["target"] == "clients" else {}
        answers = result.predict(pd.read_csv("patients.csv")[:10], **client)
        kind = "values" if spec["data"].get("kind") == "regression" else "probabilities"
        numbers["answers/"] = np.asarray(getattr(answers, kind))
    return numbers


def leaves(value: Any, place: str) -> Iterator[tuple[str, float]]:
    """Every number by its place."""
    if isinstance(value, dict | list):
        for k, v in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(v, f"{place}/{k}")
    elif isinstance(value, int | float):
        yield place, value
