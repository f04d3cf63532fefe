"""What a client of the federation can gain by false answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedshift.errors import InputError
from fedshift.experiments.config.load import dumps, validate
from fedshift.experiments.on_flower import configured_site
from fedshift.flower import LocalGrid, client_app, routing
from fedshift.flower.client import partition
from fedshift.recipes import Setting, fedavg
from fedshift.router.parts import folds_of
from fedshift_deploy.chosen import CHOICES, SITE
from fedshift_deploy.machines import deployed
from fedshift_deploy.sites import gathering
from fedshift_deploy.sites.asking import Sites
from support.federation_grid import Watched
from support.federations import SIZES, make_federation
from support.flower_runs import sites, strategy_of
from support.own_sites import deploy, joined, places, resolved

LIAR = 2
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def experiment(**more: Any) -> str:
    """Three small clients, two rounds."""
    return dumps(validate({
        "name": "run", "data": {"name": "fashion-mnist-mini", "limit": 300},
        "shift": {"kind": "dirichlet-per-client", "beta": 1.0, "clients": 3},
        "model": {"name": "linear"}, "method": {"name": "fedavg"},
        "training": {"rounds": 2, "steps": 2, "lr": 0.05, "evaluate_every": 1},
    } | more))  # fmt: skip


def played(out: Path, text: str, count: int, site: str = CHOICES[SITE]) -> dict[str, Any]:
    """The results where the liar claims so many right examples of each class."""
    app = client_app(partial(configured_site, text))

    def answer(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == "evaluate" and partition(context) == LIAR and count:
            rows: Any = {name: [count] * 10 for name in ("correct", "total", "predicted")}
            reply.content = RecordDict({"score": MetricRecord({**rows, "loss_sum": 0.0})})
        return reply

    given = {"experiment": text, "out": str(out), "patience": 5.0, "timeout": 5.0, "site": site}
    grid: Any = LocalGrid(answer, 3)  # type: ignore[arg-type]
    deployed.server_app(grid, SimpleNamespace(run_config=given))  # type: ignore[arg-type]
    final: dict[str, Any] = json.loads((out / "summary.json").read_text())["final"]
    return final


@pytest.mark.slow
def test_scores_of_more_examples_than_it_has(tmp_path: Path) -> None:
    """They would decide the estimate, and with it the round that `keep = "best"` keeps."""
    honest = played(tmp_path / "honest", experiment(), 0)["estimated_accuracy"]
    lied = played(tmp_path / "lied", experiment(), 10**6)["estimated_accuracy"]
    assert abs(lied - honest) < 0.3
    # The control: data of the clients' own, whose numbers the server cannot know.
    elsewhere = played(tmp_path / "free", experiment(), 10**6, "theirs:site")["estimated_accuracy"]
    assert elsewhere > 0.999


@pytest.mark.slow
def test_scores_beyond_all_examples_end_no_run(tmp_path: Path) -> None:
    assert played(tmp_path / "run", experiment(), 10**18, "theirs:site")["estimated_accuracy"] < 0.9


class Named(LocalGrid):
    """Nodes registered by the folders of their clients; one of them claims another client."""

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=1000 + 7 * i, name=f"client-{i}") for i in range(6)]


def test_a_node_is_the_client_of_its_key(setting: Setting) -> None:
    """Client 4 comes as client 0, which is not there yet."""
    method, federation = fedavg(setting), make_federation(setting.model)
    partitions = {i: i for i in range(1, len(SIZES))} | {4: 0}
    grid = Named(client_app(sites(method, federation)), 6, partitions=partitions)
    strategy = strategy_of(method, federation, places=True, min_clients=4)
    with pytest.raises(InputError, match="it has the key of client-4 and says that it is client 0"):
        strategy.begin(grid)
    free = strategy_of(method, federation, min_clients=4)
    free.begin(grid)
    assert free.met is not None
    assert free.met.nodes[0] == 1028


def test_a_site_is_the_client_of_its_key() -> None:
    class Grid(Named):
        def send_and_receive(self, messages: Iterable[Message], **given: Any) -> list[Message]:
            answer = RecordDict({"site": self.record})
            return [Message(answer, reply_to=m) for m in messages]

        record: Any

    grid = Grid(lambda m, c: m, 1)  # type: ignore[arg-type]
    for client, message in ((1, "it has the key of client-0 and says"), (0, "1 of 2 clients are")):
        grid.record = ConfigRecord({"client": client, "answer": '{"labels": [1], "spans": {}}'})
        with pytest.raises(InputError, match=message):
            Sites(grid, ("east", "west"), 0.0, 0.0, lambda event: None).surveys()


def all_ones(name: str, answer: dict[str, torch.Tensor], value: float) -> dict[str, torch.Tensor]:
    return answer | {k: torch.full_like(v, value) for k, v in answer.items() if k == name}


LIES: dict[str, Change] = {
    "two numbers of examples": lambda a: a | ({"n": a["n"].repeat(2)} if "n" in a else {}),
    "half an example": lambda a: all_ones("n", a, 0.5),
    "a variance below 0": lambda a: a | ({"square": -a["square"]} if "sum" in a else {}),
    "sums too large for squares": lambda a: all_ones("sum", a, 1e300),
    "losses below 0": lambda a: all_ones("loss", a, -1e9),
    "another form": lambda a: {k: v[:-1] if k in ("sum", "gamma") else v for k, v in a.items()},
}
ROUTED = {
    "shift": {"target": "clients", "kind": "dirichlet-per-client", "beta": 1.0, "clients": 3},
    "model": {"name": "mlp-projected", "hidden": [8]}, "method": {"name": "feddrm"},
}  # fmt: skip


def routed(place: Path, lie: Change) -> list[str]:
    """The sentences on routers of a run whose client 2 changes its sums."""

    class Lying(Watched):
        def send_and_receive(self, messages: Iterable[Message], **given: Any) -> list[Message]:
            sent = list(messages)
            replies = super().send_and_receive(sent, **given)
            about = sent[0].metadata.message_type if sent else ""
            for name, record in replies[0].content.array_records.items() if replies else ():
                if about == "query.router":
                    answer = {k: v.clone() for k, v in record.to_torch_state_dict().items()}
                    replies[0].content[name] = ArrayRecord(lie(answer))
            return replies

    place.mkdir()
    out = Lying(experiment(**ROUTED), place / "run", place / "kept").serve()
    return [w for w in json.loads((out / "summary.json").read_text())["why"] if "outer" in w]


@pytest.mark.few(1)
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_sums_that_no_examples_have(lie: Change, tmp_path: Path) -> None:
    """The refit of the router is left out, naming the client; the run goes on."""
    text = " ".join(routed(tmp_path / "run", lie))
    assert "The router has no moment layer: client 2 sent" in text
    assert "nats" not in text


@pytest.mark.slow
def test_such_sums_without_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "possible", lambda *_: True)
    with pytest.raises(RuntimeError):
        routed(tmp_path / "ends", LIES["sums too large for squares"])
    assert "loss -" in " ".join(routed(tmp_path / "lies", LIES["losses below 0"]))


def test_folds_of_a_client_that_claims_all_examples() -> None:
    """A permutation of so many examples would not fit into memory."""
    assert folds_of(torch.tensor([1e12, 30.0]).double()) == [0]


def of_numbers(**given: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda a: a | {"numbers": {k: v | given for k, v in a["numbers"].items()}}


SUMS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "a sum beyond the largest value": ("totals", of_numbers(exact=1e200, narrow=1e200)),
    "more rows than it has": ("totals", of_numbers(count=10**7)),
    "a sum of no rows": ("totals", of_numbers(count=0)),
    "values beyond its span": ("totals", of_numbers(least=-1e9, most=1e9)),
    "squares beyond the largest": (
        "squares", lambda a: {"squares": dict.fromkeys(a["squares"], 1e308)}
    ),
    "no squares": ("squares", lambda a: {"squares": {}}),
}  # fmt: skip


def agreed(place: Path, patch: pytest.MonkeyPatch, step: str, lie: Any) -> Path:
    """A run with the clients' own data, whose client 2 changes its answer to one question."""

    def lying(app: Any) -> Any:
        def answer(message: Message, context: Context) -> Message:
            reply = app(message, context)
            question = message.content.config_records.get("site")
            if question and question["step"] == step and partition(context) == LIAR:
                made = json.dumps(lie(json.loads(reply.content["site"]["answer"])))
                reply.content["site"] = ConfigRecord({"client": LIAR, "answer": made})
            return reply

        return answer

    folders = places(place / "c", joined())
    return deploy(patch, folders, place / "run", resolved(place), lying)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", SUMS)
def test_sums_before_round_1_that_no_rows_have(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could move the common mean anywhere, or blame other clients."""
    step, lie = SUMS[case]
    with pytest.raises(InputError, match='"south" sent sums of column "age" that no rows have'):
        agreed(tmp_path, monkeypatch, step, lie)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow")
def test_sums_before_round_1_without_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "are_of_rows", lambda *_: True)
    with pytest.raises(InputError, match='3 of 3 clients do not fit: "coast": Val'):
        agreed(tmp_path, monkeypatch, *SUMS["a sum beyond the largest value"])
