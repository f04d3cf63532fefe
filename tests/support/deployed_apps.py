"""A deployed federation's app for tests, whose clients misbehave as the run's configuration says.

The run's "plan" is "WHAT ROUND PARTITION" and more of these, divided by semicolons; or "states",
and then the run ends with everything that server and clients keep in one file.
"""

from __future__ import annotations

import json
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from fedshift.experiments.on_flower import built_from, configured_site
from fedshift.flower import AlgorithmStrategy, Site, play
from fedshift.flower.client import app_of, partition
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.tree import flatten
from fedshift_deploy.chosen import imported
from fedshift_deploy.machines import deployed
from support.flower_faults import spoilt
from support.liars import lied

ODD = 1
# One by one: Flower looks for such lines.
client_app = ClientApp()
server_app = ServerApp()


def planned(context: Context, t: int) -> str | None:
    """The misbehaviour planned for this client in round t, if any."""
    for one in str(context.run_config["plan"]).split(";"):
        what, *place = one.split() or [""]
        if place == [str(t), str(partition(context))]:
            return what
    return None


def site_of(context: Context) -> Site:
    """The deployed app's site, also for experiments that only a simulation can measure."""
    named = str(context.run_config["site"])
    if context.run_config["plan"] != "states" and not named.startswith(f"{__name__}:"):
        return deployed.site_of(context)
    # These clients trust their server with the choice.
    return imported(named)(str(context.run_config["experiment"]), partition(context))


ours = app_of(site_of, threads=1, open_states=True, keep=deployed.state_folder())


@client_app.query("register")
def register(message: Message, context: Context) -> Message:
    reply = ours(message, context)
    if planned(context, 0) == "lie":
        reply.content = lied(reply.content)
    return reply


@client_app.query("site")
def answer_site(message: Message, context: Context) -> Message:
    return deployed.client_app(message, context)


@client_app.query("state")
def state(message: Message, context: Context) -> Message:
    return ours(message, context)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return ours(message, context)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    t, client = int(message.content["run"]["round"]), partition(context)  # type: ignore
    what = planned(context, t)
    if what == "raise":
        raise RuntimeError("the disk is on fire")
    if what is not None and what.startswith("hang-"):
        time.sleep(float(what.removeprefix("hang-")))
    reply = ours(message, context)
    if what is not None and what.startswith("swell-"):
        more = np.zeros(int(what.removeprefix("swell-")) * 10**6, np.uint8)
        reply.content["more"] = ArrayRecord({"zeros": Array(more)})
    if what == "nan":
        reply.content = spoilt("nan", reply.content, client, t)
    return reply


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    if context.run_config["plan"] != "states":
        deployed.server_app(grid, context)
        return
    algorithm, federation, _ = built_from(str(context.run_config["experiment"]))
    strategy = AlgorithmStrategy(
        algorithm,
        clients=len(federation.clients),
        classes=federation.table["labels"].shape[1],
        seeds=federation.seeds,
        first=(federation.params, federation.buffers),
        timeout=120.0,
    )
    rounds = 2
    *_, last = play(strategy, grid, rounds, states=lambda t: t == rounds)
    states = {f"client {i} {part}": v for i, s in last.states.items() for part, v in s.items()}
    tensors = {k: v.contiguous().clone() for k, v in flatten(last.server | states).items()}
    out = Path(str(context.run_config["out"]))
    out.mkdir()
    save_file(tensors, out / "states.safetensors")
    (out / "summary.json").write_text("{}")


def other_network(text: str, client: int) -> Site:
    """A site whose client ODD has another network than the experiment's."""
    site = configured_site(text, client)
    if client != ODD:
        return site
    wide = build(lambda: Mlp(tuple(site.data.x.shape[1:]), (9,), 10), seed=0)
    return replace(site, first=wide.init())


def other_classes(text: str, client: int) -> Site:
    """A site whose client ODD has a label that the server does not know."""
    site = configured_site(text, client)
    if client != ODD:
        return site
    return replace(site, data=site.data._replace(y=torch.full_like(site.data.y, 10)))


def use_these(folder: Path) -> None:
    """Make a federation's app use this module, on the server and on all clients."""
    app = folder / "app" / "pyproject.toml"
    text = app.read_text(encoding="utf-8").replace(
        "fedshift_deploy.machines.deployed:", f"{__name__}:"
    )
    text = text.replace('out = ""', 'out = ""\nplan = ""')
    settings = tomllib.loads(text)["tool"]["flwr"]["app"]
    assert settings["components"]["clientapp"] == f"{__name__}:client_app"
    assert settings["config"]["plan"] == ""
    app.write_text(text, encoding="utf-8")
    for place in (folder / "clients").iterdir():
        client = json.loads((place / "client.json").read_text()) | {"app": f"{__name__}:client_app"}
        (place / "client.json").write_text(json.dumps(client))
