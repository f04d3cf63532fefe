"""Wrong uses, and wrong reports on right ones, of weights, options and backends."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshift.diagnose import diagnose
from fedshift.errors import FedshiftError
from fedshift.experiments.config.load import load_config, validate
from fedshift.experiments.engines import InProcess, backend_of
from fedshift.experiments.experiment import record, run_experiment
from fedshift.experiments.task.preparing import prepare
from fedshift.server.combine import check_weights
from fedshift.server.pals import pals_weights

SMALL: dict[str, Any] = {
    "shift": {"kind": "sparsity", "labels_per_client": 3, "clients": 9},
    "model": {"name": "linear"},
    "method": {"name": "fedpals", "ess": 0.8},
    "training": {"rounds": 3, "steps": 1},
}


def recorded(**more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, events) of a small run."""
    config = validate({**SMALL, **more})
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        folder.mkdir()
        record(folder, config, prepare(config), events.append)
        return json.loads((folder / "summary.json").read_text()), events


def loaded(text: str, *overrides: str) -> Any:
    """A configuration of a file with -c options."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "f.toml"
        path.write_text(text)
        return load_config(path, overrides)


def carried(text: str, override: str, section: str, key: str) -> str:
    """What becomes of a file's key under another name."""
    try:
        config = loaded(text, override, "shift.target=clients")
    except FedshiftError as e:
        return f"refused: {e}"
    table = getattr(config, section)
    value = table.options.get(key) if section == "method" else getattr(table, key)
    return "right" if value is None else f"silent: {section}.{key} = {value} means something else"


def trap_ess_of_a_cohort() -> str:
    """I draw 4 of 9 clients a round and read the ESS share in summary.json."""
    training = SMALL["training"] | {"cohort": 4, "evaluate_every": 1}
    summary, events = recorded(training=training, method={"name": "fedpals", "lam": 0.0})
    rounds = [e for e in events if e["event"] == "evaluation"]
    # Every client has 336 examples, so a cohort has four times as many.
    played = float(np.mean([e["ess"] / (4 * 336) for e in rounds]))
    if abs(summary["ess_fraction"] - played) < 1e-9:
        return "right"
    return f"silent: {summary['ess_fraction']:.2f} is said, {played:.2f} was played"


def trap_gap_and_shares_of_a_cohort() -> str:
    """I draw 4 of 9 clients a round and look in events.jsonl for the weights that were used."""
    _, events = recorded(training=SMALL["training"] | {"cohort": 4})
    rounds = [e for e in events if e["event"] == "round"]
    whole = all({"weights", "gap", "ess"} <= e.keys() for e in rounds)
    return "right" if whole else "silent: rounds say nothing of their weights"


def trap_dishonest_client() -> str:
    """I read how much of the average one dishonest client can have, and a client lies."""
    counts, target = np.array([[90, 10, 0], [0, 60, 40], [50, 0, 50]]), [0.2, 0.5, 0.3]
    text = "\n".join(diagnose(counts, target, lam=1.0).verdict)
    claimed = counts.astype(float)
    claimed[0] = 1000 * np.array(target)
    has = 100 * float(pals_weights(claimed, target, lam=1.0).weights[0])
    bound = re.search(r"dishonest client can have at most ([\d.]+) %", text)
    if bound is not None and has > float(bound[1]):
        return f"silent: at most {bound[1]} % is said, and a liar has {has:.1f} %"
    return "right" if "Only a cap" in text else "silent: no word of dishonest clients"


def trap_ess_below_the_closest_mixtures() -> str:
    """I ask for an ESS of 5 % where the closest mixture has more, and take it for a setting."""
    summary, _ = recorded(method={"name": "fedpals", "ess": 0.05})
    explained = any("changes nothing" in sentence for sentence in summary["why"])
    return (
        "right" if explained else f"silent: {100 * summary['ess_fraction']:.0f} % and no word of it"
    )


def trap_mu_of_another_method() -> str:
    """I compare fedprox with moon by -c method.name=moon on one file."""
    text = '[method]\nname = "fedprox"\nmu = 0.01\n[model]\nname = "mlp"\n'
    return carried(text, "method.name=moon", "method", "mu")


def trap_lam_of_another_method() -> str:
    """I compare ditto with feddrm by -c method.name=feddrm on one file."""
    text = '[method]\nname = "ditto"\nlam = 0.5\n[model]\nname = "mlp-projected"\n'
    return carried(text, "method.name=feddrm", "method", "lam")


def trap_projection_of_another_network() -> str:
    """I compare networks by -c model.name=lenet-moon on a file with a ResNet's projection."""
    text = '[model]\nname = "resnet18"\nprojection = 64\n'
    return carried(text, "model.name=lenet-moon", "model", "projection")


def trap_beta_of_another_shift() -> str:
    """I compare shifts by -c shift.kind=quantity on a file with a beta for labels."""
    text = '[shift]\nkind = "dirichlet-per-client"\nbeta = 0.1\n'
    return carried(text, "shift.kind=quantity", "shift", "beta")


def trap_lambda_of_another_method() -> str:
    """I read `lam` of feddrm's summary.json as the lambda of its weights, as the docs say."""
    shift = {"kind": "iid", "clients": 3, "target": "clients"}
    model = {"name": "mlp-projected", "hidden": [4]}
    summary, _ = recorded(shift=shift, model=model, method={"name": "feddrm", "lam": 0.5})
    return (
        "right" if summary["lam"] is None else f"silent: lambda {summary['lam']} of a loss's weight"
    )


def trap_retries_in_one_process() -> str:
    """I set training.retries for a run without workers."""
    config = validate({**SMALL, "training": SMALL["training"] | {"retries": 3}})
    try:
        run_experiment(config, engine=InProcess())
    except FedshiftError as e:
        return f"refused: {e}"
    return "silent: nobody is ever asked again"


def trap_dense_with_convolutions() -> str:
    """I start a run of convolutions with --backend dense and read how many rounds it has."""
    config = validate({**SMALL, "model": {"name": "lenet"}})
    events: list[dict[str, Any]] = []
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            run_experiment(config, engine=backend_of("dense"), listen=events.append)
    except FedshiftError as e:
        return (
            f"silent: {events[0]['rounds']} rounds are told of first" if events else f"refused: {e}"
        )
    return "silent: it trained"


def trap_sum_of_weights_overflows() -> str:
    """My weight rule gives finite numbers whose sum overflows, and I read the message."""
    try:
        check_weights(torch.tensor([1e308, 1e308], dtype=torch.float64), 2)
    except ValueError as e:
        if "shape" in str(e):
            return f"silent: it is called a matter of shapes: {e}"
        return f"refused: {e}"
    return "silent: they pass"
