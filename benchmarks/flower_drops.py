"""Clients killed at random: `python benchmarks/flower_drops.py [--clients 10] [--rounds 100]`.

Real processes on this machine: a server and its clients, with TLS and keys. Every so many rounds
`kill -9` ends the SuperNode of a random client; `deploy client` joins again by itself. With
`--late`, the last client is started only after round 2. The model must be, bit for bit, that of a
run in one process in which the same clients are away or lost in the same rounds.

The federation is in `--folder`. The same command resumes a run that was interrupted, and only
compares one that is over. `--write` writes results/flower_drops.md. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flower_faults import FEDSHIFT, Fed, kill
from safetensors.torch import load_file

from fedshift.engine.run import play_round, start
from fedshift.experiments.config.load import validate
from fedshift.experiments.experiment import federation_of, method_of
from fedshift.experiments.task.preparing import prepare
from fedshift.flower.strategy import GONE, NOT_YET
from fedshift.testing.faults import Faulty, at
from fedshift_deploy.processes import free_port

OUT = Path(__file__).parents[1] / "results" / "flower_drops.md"
EXPERIMENT = """name = "run"
data.name = "fashion-mnist-mini"
shift = {{ kind = "sparsity", labels_per_client = 4, clients = {clients} }}
model.name = "linear"
method = {{ name = "fedpals", ess = 0.5 }}
training = {{ rounds = {rounds}, steps = 5, lr = 0.05, evaluate_every = {rounds} }}
"""


def place_of(folder: Path, clients: int, rounds: int) -> Fed:
    """The federation's folder, made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    fed = Fed(folder, free_port())
    if not fed.folder.exists():
        (folder / "e.toml").write_text(EXPERIMENT.format(clients=clients, rounds=rounds))
        init = [FEDSHIFT, "deploy", "init", str(folder / "e.toml"), str(fed.folder)]
        subprocess.run([*init, "--host", "127.0.0.1"], check=True, stdout=subprocess.DEVNULL)
    return fed


def played(run: Path) -> dict[int, dict[str, Any]]:
    """The events of all rounds that are over; of a round that was played again, the last."""
    with contextlib.suppress(FileNotFoundError):
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        return {e["round"]: e for e in events if e["event"] == "round"}
    return {}


def killed(fed: Fed) -> list[str]:
    """What was killed after which round, in all sittings."""
    log = fed.place / "kills.json"
    return json.loads(log.read_text()) if log.exists() else []


def play(fed: Fed, clients: int, rounds: int, every: int, seed: int, late: bool) -> None:
    """The run, from where it is."""
    source, run = random.Random(seed), fed.folder / "run"
    waits = ["--timeout", "300", "--patience", "900", "--min-clients", str(clients - late)]
    if late and not played(run):
        waits[3] = "60"
    more = ["--resume", str(run)] if (run / "checkpoints").exists() else []
    server = fed.serve(*waits, *more)
    fed.join(*range(clients - (late and not played(run))), patience=3600.0)
    joined = bool(played(run)) or not late
    try:
        for t in range(1, rounds):
            victim = source.randrange(clients - late)
            if t <= max(played(run), default=0):
                continue
            while t not in played(run) and server.code(0.2) is None:
                pass
            if not joined and t >= 2:
                fed.join(clients - 1, patience=3600.0)
                joined = True
            if t % every == 0 and (node := fed.below(victim, "flower-supernode")):
                kill(node)
                kills = [*killed(fed), f"{victim} after round {t}"]
                (fed.place / "kills.json").write_text(json.dumps(kills))
                print("killed", kills[-1], flush=True)
        if code := server.code(3600.0):
            raise SystemExit(f"the server ended with {code}: {server.words()}")
    finally:
        fed.end()


def different(fed: Fed) -> list[str]:
    """The tensors in which the run's model differs from that of one process, same drop-outs."""
    text = (fed.folder / "experiment.toml").read_text()
    config = validate(tomllib.loads(text), text=text)
    prepared = prepare(config)
    federation = federation_of(config.method, prepared)
    federation = replace(federation, gate=replace(federation.gate, on_bad="drop"))
    algorithm = method_of(config.method, config.training, prepared)(**config.method.options)
    server = start(algorithm, federation).server
    for t, event in sorted(played(fed.folder / "run").items()):
        # Weights of a round are solved without the clients away at its start; a client lost later
        # leaves its weight to those that were asked with it.
        dropped = {one["client"]: one["reason"] for one in event.get("dropped", [])}
        away = {client for client, reason in dropped.items() if reason in (GONE, NOT_YET)}
        lost = Faulty(at({(t, client): "drop" for client in dropped.keys() - away}))
        ids = [i for i in range(len(federation.clients)) if i not in away]
        one = play_round(algorithm, federation, server, {}, torch.tensor(ids), t, lost)
        server = one.server
    model = load_file(fed.folder / "run" / "model.safetensors")
    return [k for k, v in server["params"].items() if not model[f"params/{k}"].equal(v)]


def main() -> int:
    """Play and compare; exit code 1 where a tensor differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--every", type=int, default=4, help="rounds between two kills")
    parser.add_argument("--late", action="store_true", help="the last client comes after round 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/flower_drops"))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    fed = place_of(arguments.folder.absolute(), arguments.clients, arguments.rounds)
    run = fed.folder / "run"
    if not (run / "summary.json").exists():
        play(
            fed,
            arguments.clients,
            arguments.rounds,
            arguments.every,
            arguments.seed,
            arguments.late,
        )
    rounds, odd = played(run), different(fed)
    lost = [one for event in rounds.values() for one in event.get("dropped", [])]
    options = f"--clients {arguments.clients} --rounds {arguments.rounds} --every {arguments.every}"
    options += " --late" if arguments.late else ""
    text = PAGE.format(
        options=options, clients=arguments.clients, rounds=len(rounds),
        kills=len(killed(fed)), lost=len(lost),
        without=sum("dropped" in e for e in rounds.values()),
        same="the same bits in every tensor" if not odd else f"other numbers in {odd}",
    )  # fmt: skip
    print(text)
    if arguments.write:
        OUT.write_text(text)
    return int(bool(odd))


PAGE = """# Clients killed at random

`python benchmarks/flower_drops.py {options} --write`: a server and {clients} clients in processes
of their own, with TLS and keys, FedPALS on a linear network; `kill -9` of a random client's
SuperNode every few rounds; with `--late`, the last client is started after round 2. The model is
set beside that of one process with the same drop-outs: clients that are away when a round begins,
and clients whose answers are lost in it.

| rounds | SuperNodes killed | rounds without some client | answers missing | the model |
| --- | --- | --- | --- | --- |
| {rounds} | {kills} | {without} | {lost} | {same} |
"""

if __name__ == "__main__":
    sys.exit(main())
