"""Clients with data of their own in a deployed run: equal to one process on the joined table."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

import fedshift as fs
from fedshift.errors import DataError, InputError
from fedshift_deploy.notices import NOTICES
from fedshift_deploy.sites.answering import EXPERIMENT
from support.federation_grid import events_in, summary_of
from support.own_sites import FILE, SITES, deploy, joined, places, resolved, together

SAME = ("model.safetensors", "encoding.json", "clients.csv")


def differing(here: Path, there: Path) -> list[str]:
    return [name for name in SAME if (here / name).read_bytes() != (there / name).read_bytes()]


def instead(answer: Callable[[str, Message, Any], Any]) -> Callable[[Any], Any]:
    """A wrapper of an app: `answer` of (step or round, message, context) comes first, if not None.

    It gets the steps of questions to east alone.
    """

    def wrap(app: Any) -> Any:
        def handle(message: Message, context: Any) -> Message:
            records = message.content.config_records
            at_east = context.node_config["partition-id"] == 1
            step = str(records["site"]["step"]) if "site" in records and at_east else ""
            step = str(records["run"]["round"]) if "run" in records else step
            made = answer(step, message, lambda: app(message, context))
            return app(message, context) if made is None else made  # type: ignore[no-any-return]

        return handle

    return wrap


def test_the_model_of_the_joined_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: encoding, cut, weights, model; a changed cell at one site is another model."""
    table = joined()
    folders, given = places(tmp_path / "c", table), resolved(tmp_path)
    monkeypatch.setenv(NOTICES, str(tmp_path / "notices"))
    there = deploy(monkeypatch, folders, tmp_path / "there", given)
    monkeypatch.delenv(NOTICES)
    last = (tmp_path / "notices").read_text().splitlines()[-1]
    assert json.loads(last) == {"round": 2, "rounds": 2}
    here = together(tmp_path, table)
    assert differing(here, there) == []
    rows = [list(csv.DictReader((f / "metrics.csv").open())) for f in (here, there)]
    for a, b in zip(*rows, strict=True):
        for key in ("train_loss", "estimated_accuracy", "source_accuracy", "gap", "ess"):
            assert float(a[key]) == float(b[key]), key
    # Test rows follow T by the same rule: as many of each class.
    assert by_class(here) == by_class(there)
    predicted = fs.load(there).predict(table.drop(columns=["site", "outcome"]))
    assert {*predicted.names} == {"well", "ill"}
    text_there = (folders[2] / "data.csv").read_text().replace("hospice", "surgery")
    (folders[2] / "data.csv").write_text(text_there)
    other = deploy(monkeypatch, folders, tmp_path / "other", given)
    assert differing(here, other)[:2] == ["model.safetensors", "encoding.json"]


def by_class(folder: Path) -> dict[str, int]:
    """The number of scored test rows of each class."""
    rows, counts = csv.DictReader((folder / "confusion.csv").open()), dict[str, int]()
    for truth, _, count in (row.values() for row in rows):
        counts[truth] = counts.get(truth, 0) + int(count)
    return counts


TARGET = "target = {well = 0.3, ill = 0.7}"
DITTO = FILE.replace('"fedpals"\ness = 0.5', '"ditto"').replace(TARGET, 'target = "clients"')
OTHERS = {
    "another method": (FILE.replace('"fedpals"\ness = 0.5', '"scaffold"'), SAME),
    "rows of the target at the server": (
        FILE.replace(TARGET, 'target = "north.csv"'),
        (*SAME, "confusion.csv"),
    ),
    "models that stay at their sites": (DITTO, ("encoding.json",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_other_runs_of_the_joined_table(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text, files), table = OTHERS[case], joined()
    joined(1, 40).drop(columns="site").to_csv(tmp_path / "north.csv", index=False)
    folders, given = places(tmp_path / "c", table, text), resolved(tmp_path, text)
    there = deploy(monkeypatch, folders, tmp_path / "there", given)
    here = together(tmp_path, table, text)
    for name in files:
        assert (here / name).read_bytes() == (there / name).read_bytes(), name
    if text is DITTO:  # each is tested on its own site's rows, with the accuracies of one process
        served = [list(csv.DictReader((f / "served.csv").open())) for f in (here, there)]
        for a, b in zip(*served, strict=True):
            for key in ("average_accuracy", "worst_accuracy", "global_accuracy"):
                assert a[key] == b[key], key


@pytest.mark.slow
def test_arrays_of_a_function_of_the_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """site.py gives bytes of images; the same as `Task.from_arrays` of all."""
    text = FILE.replace('columns = ["age", "sex", "day", "marker", "ward"]', "input = [1, 4, 4]")
    text = text.replace('categories = ["sex", "ward"]\n', "").replace('label = "outcome"\n', "")
    folders = places(tmp_path / "c", joined(), text)
    x = torch.randint(0, 256, (90, 1, 4, 4), generator=torch.manual_seed(0)).to(torch.uint8)
    y = torch.randint(0, 2, (90,), generator=torch.manual_seed(1))
    client = [SITES[i % 3] for i in range(90)]
    for i, place in enumerate(folders):
        torch.save((x[i::3], y[i::3]), place / "mine.pt")
        loads(place, f"import torch; return torch.load({str(place / 'mine.pt')!r})")
    there = deploy(monkeypatch, folders, tmp_path / "there", resolved(tmp_path, text))
    task = fs.Task.from_arrays(
        x, y, client=client, target={"well": 0.3, "ill": 0.7}, classes=["well", "ill"]
    )
    out = tmp_path / "here"
    options: dict[str, Any] = {"method": "fedpals", "ess": 0.5, "hidden": (8,)}
    # The site's experiment file corrects nothing.
    fs.fit(task, "mlp", rounds=2, steps=4, batch=32, lr=0.1, prior="none", folder=out, **options)
    assert differing(out, there) == []


def loads(place: Path, body: str) -> None:
    (place / "site.toml").write_text('[data]\nsource = "site.py:load"\n')
    (place / "site.py").write_text(f"def load():\n    {body}\n")


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        text = (place / name).read_text()
        assert old in text
        (place / name).write_text(text.replace(old, new, 1))

    return change


# What is wrong at east, what the server reads, and what the site's own operator reads of it.
BAD: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "missing": (
        replaced("data.csv", "marker", "marker_b"),
        'column "marker" is missing',
        'data.csv has no column "marker"; it has age',
    ),
    "text": (replaced("data.csv", "20240", "no20240"), 'column "day"', 'line 2: "no20240'),
    "class": (
        replaced("data.csv", ",ill\n", ",dying\n"),
        'column "outcome" has a label that is none of the classes: well, ill',
        '"dying"; the classes are well, ill',
    ),
    "no file": (replaced("site.toml", "data.csv", "secret.csv"), "cannot be read", "secret.csv"),
    "key": (replaced("site.toml", "source", "sauce"), "cannot be read", '"source"?'),
    "other declaration": (
        replaced(EXPERIMENT, '"age", ', ""),
        "another data.columns",
        "has another data.columns than",
    ),
    "a function that fails": (
        lambda place: loads(place, "raise KeyError('dying')"),
        "cannot be read",
        "dying",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_site_whose_data_do_not_fit(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server reads which site and column it is, and nothing that the site's rows hold."""
    change, words, shown = BAD[case]
    monkeypatch.setenv(NOTICES, str(tmp_path / "notices"))
    folders = places(tmp_path / "c", joined())
    change(folders[1])
    with pytest.raises(InputError) as e:
        deploy(monkeypatch, folders, tmp_path / "run", resolved(tmp_path))
    assert not (tmp_path / "run").exists()
    (trouble,) = {json.loads(line)["trouble"] for line in (tmp_path / "notices").open()}
    assert shown in trouble
    assert shown in caplog.text
    error = str(e.value)
    assert '"east"' in error
    assert words in error
    for secret in ("no20240", "dying", "secret", "marker_b", str(tmp_path), "line", "sauce"):
        assert secret not in error


def test_all_sites_whose_data_do_not_fit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: each start of a federation takes a minute. And a site that is not there."""
    folders = places(tmp_path / "c", joined())
    with pytest.raises(InputError, match=r"2 of 3 clients are connected .* without south"):
        deploy(monkeypatch, folders[:2], tmp_path / "run", resolved(tmp_path))
    BAD["missing"][0](folders[1])
    BAD["class"][0](folders[2])
    with pytest.raises(InputError, match=r'2 of 3 clients.*"east".*"south"'):
        deploy(monkeypatch, folders, tmp_path / "run", resolved(tmp_path))


def test_a_site_that_is_gone_is_not_one_whose_data_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the first question it is asked again once it is back; later the run ends."""
    gone, steps = {"survey": 1, "totals": 1}, list[str]()

    def flaky(step: str, message: Message, app: Any) -> Message | None:
        steps.extend([step] if step else [])
        if not gone.get(step, 0):
            return None
        gone[step] -= 1
        return Message(Error(ErrorCode.NODE_UNAVAILABLE, "beat"), reply_to=message)

    folders, text = places(tmp_path / "c", joined()), resolved(tmp_path)
    with pytest.raises(InputError, match='1 of 3 clients did not answer before round 1: "east"'):
        deploy(monkeypatch, folders, tmp_path / "run", text, instead(flaky))
    assert steps == ["survey", "survey", "totals"]


@pytest.mark.slow
def test_data_that_change_while_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a client drops out with the reason, and the summary says what was not measured."""
    folders = places(tmp_path / "c", joined())
    change, changed = replaced("data.csv", ",ill\n", ",well\n"), list[bool]()

    def changing(step: str, message: Message, app: Any) -> None:
        if not changed and step == "2":
            change(folders[1])
            changed.append(True)

    text = resolved(tmp_path, FILE.replace('name = "fedpals"\ness = 0.5', 'name = "fedavg"'))
    text = text.replace('on_bad_reply = "stop"', 'on_bad_reply = "drop"')
    out = deploy(monkeypatch, folders, tmp_path / "run", text, instead(changing))
    rounds = [event for event in events_in(out) if event["event"] == "round"]
    lost = [(event["round"], d) for event in rounds for d in event.get("dropped", ())]
    assert [(t, d["client"]) for t, d in lost] == [(2, 1)]
    assert "its data are not those with which the run began" in lost[0][1]["reason"]
    assert any("2 of 3 clients" in why for why in summary_of(out)["why"])


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_data_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, text = places(tmp_path / "c", joined()), resolved(tmp_path)
    whole = deploy(monkeypatch, folders, tmp_path / "whole", text)
    out = tmp_path / "run"

    def stopping(step: str, message: Message, app: Any) -> None:
        if step == "2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deploy(monkeypatch, folders, out, text, instead(stopping))
    replaced("data.csv", ",ill\n", ",well\n")(folders[0])
    with pytest.raises(DataError, match="start a new run"):
        deploy(monkeypatch, folders, out, text)
    replaced("data.csv", ",well\n", ",ill\n")(folders[0])
    deploy(monkeypatch, folders, out, text)
    assert differing(whole, out) == []


LIES = {
    "rows": ("survey", '"labels":[', '"labels":[9999999,9999999,', "rows with a label"),
    "endless": ("survey", '"labels":[', '"labels":[1e999,', "Survey"),
    "columns": ("totals", '"age"', '"aga"', "other columns"),
    "no number": ("squares", '"age":', '"age":-', "Deviations"),
    "no answer": ("prepare", "{", "", "Section"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", LIES)
def test_answers_that_are_none(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that sends invalid answers is named before they are used."""
    at, old, new, words = LIES[case]

    def lying(step: str, message: Message, app: Any) -> Message | None:
        if step != at:
            return None
        reply: Message = app()
        record = reply.content["site"]
        assert old in record["answer"]
        record["answer"] = record["answer"].replace(old, new, 1)
        return reply

    folders = places(tmp_path / "c", joined())
    with pytest.raises(InputError, match=rf'"east".*{words}'):
        deploy(monkeypatch, folders, tmp_path / "run", resolved(tmp_path), instead(lying))
