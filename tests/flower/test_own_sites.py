"""Clients with data of their own in a deployed run: equal to one process on the joined table."""

from __future__ import annotations

import csv
import json
import re
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
from fedshift.flower.notices import NOTICES
from fedshift.record.drops import news_text
from fedshift_deploy.sites.answering import EXPERIMENT
from support.own_sites import FILE, SITES, deploy, joined, places, resolved, together

SAME = ("model.safetensors", "encoding.json", "clients.csv")


def differing(here: Path, there: Path) -> list[str]:
    return [name for name in SAME if (here / name).read_bytes() != (there / name).read_bytes()]


@pytest.mark.parametrize("method", ["fedpals", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_the_model_of_the_joined_table(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: encoding, cut, weights, model; a changed cell at one site is another model."""
    table = joined()
    text = FILE if method == "fedpals" else FILE.replace('"fedpals"\ness = 0.5', f'"{method}"')
    folders, given = places(tmp_path / "c", table, text), resolved(tmp_path, text)
    monkeypatch.setenv(NOTICES, str(tmp_path / "notices"))
    there = deploy(monkeypatch, folders, tmp_path / "there", given)
    monkeypatch.delenv(NOTICES)
    last = (tmp_path / "notices").read_text().splitlines()[-1]
    assert json.loads(last) == {"round": 2, "rounds": 2}
    here = together(tmp_path, table, text)
    assert differing(here, there) == []
    if method != "fedpals":
        return
    rows = [list(csv.DictReader((f / "metrics.csv").open())) for f in (here, there)]
    for a, b in zip(*rows, strict=True):
        for key in ("train_loss", "estimated_accuracy", "source_accuracy", "gap", "ess"):
            assert float(a[key]) == float(b[key]), key
    # Test rows follow T by the same rule: as many of each class.
    assert by_class(here) == by_class(there)
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


@pytest.mark.slow
def test_a_target_that_the_server_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are scored on the server: all numbers equal those of one process."""
    table = joined()
    joined(1, 40).drop(columns="site").to_csv(tmp_path / "north.csv", index=False)
    text = FILE.replace("{well = 0.3, ill = 0.7}", '"north.csv"')
    folders, given = places(tmp_path / "c", table, text), resolved(tmp_path, text)
    there = deploy(monkeypatch, folders, tmp_path / "there", given)
    here = together(tmp_path, table, text)
    assert differing(here, there) == []
    assert (here / "confusion.csv").read_bytes() == (there / "confusion.csv").read_bytes()


@pytest.mark.slow
def test_the_run_is_loaded_and_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = joined()
    there = deploy(
        monkeypatch, places(tmp_path / "c", table), tmp_path / "there", resolved(tmp_path)
    )
    result = fs.load(there)
    given = result.predict(table.drop(columns=["site", "outcome"]))
    assert {*given.names} == {"well", "ill"}


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
        (place / "site.toml").write_text('[data]\nsource = "site.py:load"\n')
        (place / "site.py").write_text(
            f"import torch\ndef load():\n    return torch.load({str(place / 'mine.pt')!r})\n"
        )
    there = deploy(monkeypatch, folders, tmp_path / "there", resolved(tmp_path, text))
    task = fs.Task.from_arrays(
        x, y, client=client, target={"well": 0.3, "ill": 0.7}, classes=["well", "ill"]
    )
    out = tmp_path / "here"
    options: dict[str, Any] = {"method": "fedpals", "ess": 0.5, "hidden": (8,)}
    # The site's experiment file corrects nothing.
    fs.fit(task, "mlp", rounds=2, steps=4, batch=32, lr=0.1, prior="none", folder=out, **options)
    assert differing(out, there) == []


def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any]) -> str:
    folders = places(tmp_path / "c", joined())
    change(folders[1])
    with pytest.raises(InputError) as e:
        deploy(monkeypatch, folders, tmp_path / "run", resolved(tmp_path))
    assert not (tmp_path / "run").exists()
    return str(e.value)


def replaced(name: str, old: str, new: str) -> Callable[[Path], Any]:
    def change(place: Path) -> None:
        text = (place / name).read_text()
        assert old in text
        (place / name).write_text(text.replace(old, new, 1))

    return change


BAD = {
    "missing": (replaced("data.csv", "marker", "marker_b"), 'column "marker" is missing'),
    "text": (replaced("data.csv", "20240", "no20240"), 'column "day": the experiment declares num'),
    "class": (
        replaced("data.csv", ",ill\n", ",dying\n"),
        'column "outcome" has a label that is none of the classes: well, ill. `fed',
    ),
    "no file": (replaced("site.toml", "data.csv", "secret.csv"), "its data cannot be read"),
    "key": (replaced("site.toml", "source", "sauce"), "its data cannot be read"),
    "other declaration": (replaced(EXPERIMENT, '"age", ', ""), "another data.columns than the ser"),
}
# What the site's own operator reads of it.
HERE = {
    "missing": 'data.csv has no column "marker"; it has age',
    "text": 'line 2: "no20240',
    "class": '"dying"; the classes are well, ill',
    "no file": "secret.csv",
    "key": 'Did you mean "source"?',
    "other declaration": "has another data.columns than",
}


@pytest.mark.parametrize("case", BAD)
def test_a_site_whose_data_do_not_fit(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server reads which site and column it is, and nothing that the site's rows hold.

    The site's operator reads on the screen what is wrong where, and what to do; no traceback.
    """
    change, words = BAD[case]
    monkeypatch.setenv(NOTICES, str(tmp_path / "notices"))
    error = refused(tmp_path, monkeypatch, change)
    problems = {json.loads(line)["trouble"] for line in (tmp_path / "notices").open()}
    (shown,) = problems
    assert HERE[case] in shown
    assert (
        "send the new file" if case == "other declaration" else "`fedshift deploy check /"
    ) in shown
    assert [record for record in caplog.records if record.exc_info] == []
    assert HERE[case] in caplog.text
    assert '"east"' in error
    assert words in error
    for secret in ("no20240", "dying", "secret", "marker_b", str(tmp_path), "line", "sauce"):
        assert secret not in error


def test_all_sites_whose_data_do_not_fit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: each start of a federation takes a minute."""

    def change(place: Path) -> None:
        BAD["missing"][0](place)
        BAD["class"][0](place.parent / "client-2")

    error = refused(tmp_path, monkeypatch, change)
    assert error.startswith('data of 2 of 3 clients do not fit: "east": column "marker" is mis')
    assert '; "south": column "outcome" has a label that is none of the classes: well' in error


def test_a_site_that_is_gone_is_not_one_whose_data_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the first question it is asked again once it is back; later the run ends."""
    gone, steps = {"survey": 1, "totals": 1}, list[str]()

    def flaky(app: Any) -> Any:
        def handle(message: Message, context: Any) -> Message:
            question = message.content.config_records.get("site")
            if question is not None and context.node_config["partition-id"] == 1:
                step = str(question["step"])
                steps.append(step)
                if gone.get(step, 0):
                    gone[step] -= 1
                    return Message(Error(ErrorCode.NODE_UNAVAILABLE, "beat"), reply_to=message)
            return app(message, context)  # type: ignore[no-any-return]

        return handle

    folders, text = places(tmp_path / "c", joined()), resolved(tmp_path)
    with pytest.raises(InputError) as e:
        deploy(monkeypatch, folders, tmp_path / "run", text, flaky)
    assert steps == ["survey", "survey", "totals"]
    assert str(e.value).startswith(
        '1 of 3 clients did not answer before round 1: "east": its node is no longer connected.'
    )


def test_errors_of_a_sites_function_stay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def change(place: Path) -> None:
        (place / "site.toml").write_text('[data]\nsource = "site.py:load"\n')
        (place / "site.py").write_text("def load():\n    raise KeyError('patient 17')\n")

    error = refused(tmp_path, monkeypatch, change)
    assert "its data cannot be read" in error
    assert "patient" not in error
    assert "patient 17" in caplog.text  # of the client's own log


@pytest.mark.slow
def test_data_that_change_while_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a client drops out with the reason, and the summary says what was not measured."""
    folders = places(tmp_path / "c", joined())
    file, changed = folders[1] / "data.csv", list[bool]()

    def changing(app: Any) -> Any:
        def handle(message: Message, context: Any) -> Message:
            run = message.content.config_records.get("run")
            if not changed and run is not None and run["round"] == 2:
                file.write_text(file.read_text().replace(",ill\n", ",well\n"))
                changed.append(True)
            return app(message, context)  # type: ignore[no-any-return]

        return handle

    text = resolved(tmp_path, FILE.replace('name = "fedpals"\ness = 0.5', 'name = "fedavg"'))
    text = text.replace('on_bad_reply = "stop"', 'on_bad_reply = "drop"')
    out = deploy(monkeypatch, folders, tmp_path / "run", text, changing)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    lost = [(e["round"], d) for e in events if e["event"] == "round" for d in e.get("dropped", ())]
    assert [(t, d["client"]) for t, d in lost] == [(2, 1)]
    assert "its data are not those with which the run began" in lost[0][1]["reason"]
    news = [news_text(event) for event in events if event["event"] == "dropped"]
    assert news[0].startswith("round 2: east dropped out (error): its data are not those")
    notes = " ".join(json.loads((out / "summary.json").read_text())["why"])
    assert "The estimate is of 2 of 3 clients" in notes
    assert re.search(r"tested on \d+ of \d+ test examples: the others are at clients", notes)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_data_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, text = places(tmp_path / "c", joined()), resolved(tmp_path)
    whole = deploy(monkeypatch, folders, tmp_path / "whole", text)
    out = tmp_path / "run"

    def stopping(app: Any) -> Any:
        def handle(message: Message, context: Any) -> Message:
            run = message.content.config_records.get("run")
            if run is not None and run["round"] == 2:
                raise KeyboardInterrupt
            return app(message, context)  # type: ignore[no-any-return]

        return handle

    with pytest.raises(KeyboardInterrupt):
        deploy(monkeypatch, folders, out, text, stopping)
    replaced("data.csv", ",ill\n", ",well\n")(folders[0])
    with pytest.raises(DataError, match="start a new run"):
        deploy(monkeypatch, folders, out, text)
    replaced("data.csv", ",well\n", ",ill\n")(folders[0])
    deploy(monkeypatch, folders, out, text)
    assert differing(whole, out) == []


def test_a_site_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(app: Any) -> Any:
        return app

    folders = places(tmp_path / "c", joined())[:2]
    with pytest.raises(InputError, match=r"2 of 3 clients are connected .* without south; start"):
        deploy(monkeypatch, folders, tmp_path / "run", resolved(tmp_path), absent)


@pytest.mark.slow
def test_models_that_stay_at_their_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ditto: each is tested on its own site's rows, with the accuracies of one process."""
    table = joined()
    text = FILE.replace('"fedpals"\ness = 0.5', '"ditto"')
    text = text.replace("target = {well = 0.3, ill = 0.7}", 'target = "clients"')
    folders, given = places(tmp_path / "c", table, text), resolved(tmp_path, text)
    there = deploy(monkeypatch, folders, tmp_path / "there", given)
    here = together(tmp_path, table, text)
    assert (here / "encoding.json").read_bytes() == (there / "encoding.json").read_bytes()
    served = [list(csv.DictReader((f / "served.csv").open())) for f in (here, there)]
    for a, b in zip(*served, strict=True):
        for key in ("average_accuracy", "worst_accuracy", "global_accuracy"):
            assert a[key] == b[key], key


LIES = {
    "rows": ("survey", '"labels":[', '"labels":[9999999,9999999,', "rows with a label"),
    "endless": ("survey", '"labels":[', '"labels":[1e999,', "its message of Survey is none"),
    "columns": ("totals", '"age"', '"aga"', "answers about other columns"),
    "no number": ("squares", '"age":', '"age":-', "its message of Deviations is none"),
    "no answer": ("prepare", "{", "", "its message of Section is none"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", LIES)
def test_answers_that_are_none(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that sends invalid answers is named before they are used."""
    at, old, new, words = LIES[case]

    def lying(app: Any) -> Any:
        def handle(message: Message, context: Any) -> Message:
            reply = app(message, context)
            question = message.content.config_records.get("site")
            at_east = context.node_config["partition-id"] == 1
            if question is not None and question["step"] == at and at_east:
                record = reply.content["site"]
                assert old in record["answer"]
                record["answer"] = record["answer"].replace(old, new, 1)
            return reply  # type: ignore[no-any-return]

        return handle

    folders = places(tmp_path / "c", joined())
    with pytest.raises(InputError, match=rf'"east".*{words}'):
        deploy(monkeypatch, folders, tmp_path / "run", resolved(tmp_path), lying)
