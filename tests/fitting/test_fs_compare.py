"""`fedshift.compare`: its runs are those of `fit`; its refusals."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedshift as fs
from fedshift.algorithms.method import Method
from fedshift.errors import InputError
from fedshift.recipes import Setting, fedprox
from support.custom_tasks import Net, hospitals, rows

FAST: dict[str, Any] = {"rounds": 3, "steps": 2, "evaluate_every": 1}


def mine(setting: Setting, *, mu: float = 0.3) -> Method:
    """FedProx by another name."""
    return fedprox(setting, mu=mu)


def files(folder: Path) -> dict[str, bytes]:
    names = ("model.safetensors", "metrics.csv", "clients.csv")
    return {name: (folder / name).read_bytes() for name in names}


def folder_of(table: fs.Table, method: str, seed: int, setting: str = "") -> Path:
    (run,) = (m.run for m in table.runs if (m.method, m.setting, m.seed) == (method, setting, seed))
    return table.folder / "runs" / run.name


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_runs_are_those_of_fit(jobs: int, tmp_path: Path) -> None:
    """Control: another seed, and another method, have other models."""
    task, option = hospitals(), fs.method("fedprox", mu=0.5)
    methods = [option, mine]
    table = fs.compare(task, Net, methods, seeds=[0, 3], jobs=jobs, **FAST)
    seen = []
    for label, method in zip(("fedprox(mu=0.5)", "mine"), methods, strict=True):
        for seed in (0, 3):
            alone = fs.fit(task, Net, method=method, seed=seed, **FAST)
            assert files(folder_of(table, label, seed)) == files(alone.folder)
            both = {
                "target_accuracy": alone.summary.final.target_accuracy,
                "target_accuracy_corrected": alone.accuracy,
            }
            for name, value in both.items():
                assert table.row(label).values(name)[seed] == value, name
            seen.append(files(alone.folder)["model.safetensors"])
    assert len(set(seen)) == len(seen)


@pytest.mark.slow
def test_options_of_a_method_of_ones_own_are_keywords() -> None:
    """Control: without the keyword the default counts, and fedavg has no such option."""
    table = fs.compare(hospitals(), Net, ["fedavg", mine], seeds=1, jobs=1, mu=5.0, **FAST)
    bare = fs.compare(hospitals(), Net, [mine], seeds=1, jobs=1, **FAST)
    alone = fs.fit(hospitals(), Net, method=fs.method(mine, mu=5.0), **FAST)
    assert files(folder_of(table, "mine", 0)) == files(alone.folder)
    assert files(folder_of(bare, "mine", 0)) != files(alone.folder)
    for key in ("loggers", "callbacks", "seed", "method", "resume"):
        with pytest.raises(InputError, match=f"compare takes no {key}: "):
            fs.compare(hospitals(), Net, ["fedavg"], **{key: 1}, **FAST)


def test_a_seed_twice_and_metrics_without_names_are_refused() -> None:
    """Control: the same seeds once each, and a dict of metrics."""
    keys: dict[str, Any] = {"jobs": 1, **FAST}
    with pytest.raises(InputError, match="a seed is there twice"):
        fs.compare(hospitals(), Net, ["fedavg"], seeds=[0, 0], **keys)
    named = {"first": lambda p, y: float(p[0, 0])}
    with pytest.raises(InputError, match=r'metrics is .*; give a dict, as {"auc": f}'):
        fs.fit(hospitals(), Net, metrics=[*named.values()], **FAST)  # type: ignore[arg-type]
    table = fs.compare(hospitals(), Net, ["fedavg"], seeds=[0], metrics=named, **keys)
    assert table.row("fedavg").values("first")


@pytest.mark.slow
def test_a_metric_alone_counts_by_its_name() -> None:
    def first(p: Any, y: Any) -> float:
        return float(p[0, 0])

    one = fs.fit(hospitals(), Net, metrics=first, **FAST)
    named = fs.fit(hospitals(), Net, metrics={"first": first}, **FAST)
    assert one.metrics == named.metrics
    assert "first" in one.metrics
    table = fs.compare(hospitals(), Net, ["fedavg"], seeds=[0], jobs=1, metrics=first, **FAST)
    assert table.row("fedavg").values("first")
    with pytest.raises(InputError, match=r'give a dict, as {"auc": f}'):
        fs.fit(hospitals(), Net, metrics=lambda p, y: 1.0, **FAST)


@pytest.mark.slow
def test_a_metric_in_percent_is_not_taken_for_a_share(tmp_path: Path) -> None:
    """Control: the same as a fraction is shown in percent."""

    def right(p: Any, y: Any) -> float:
        return float((p.argmax(1) == y).mean())

    def of_100(p: Any, y: Any) -> float:
        return 100 * right(p, y)

    few = {"rounds": 1, "seeds": 2, "jobs": 1, "metric": "my_accuracy"}
    tables = [
        fs.compare(hospitals(), "linear", ["fedavg"], metrics={"my_accuracy": f}, **few)
        for f in (right, of_100)
    ]
    assert [t.shown().header[2] for t in tables] == ["My accuracy, %", "My accuracy"]
    share, percent = (t.shown().rows[0][2] for t in tables)
    assert str(percent).startswith(str(share).split()[0])
    with pytest.raises(InputError, match="metrics is a list; give a dict"):
        fs.compare(hospitals(), "linear", ["fedavg"], metrics=[right], **few)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_grid_of_options_and_of_keys() -> None:
    """Options go to the methods that have them; a list of widths is no grid."""
    table = fs.compare(
        hospitals(), "mlp", ["fedavg", "fedpals", fs.method("fedprox", mu=[0.1, 1.0])],
        seeds=1, jobs=1, lr=[0.01, 0.1], ess=0.9, hidden=[5, 4], rounds=1, steps=1,
    )  # fmt: skip
    tried = {row.label: list(row.validation) for row in table.rows}
    assert tried == {
        "fedavg": ["lr=0.01", "lr=0.1"],
        "fedpals": ["lr=0.01", "lr=0.1"],
        "fedprox": ["mu=0.1, lr=0.01", "mu=0.1, lr=0.1", "mu=1.0, lr=0.01", "mu=1.0, lr=0.1"],
    }
    run = next(m.run for m in table.runs if m.setting == "mu=1.0, lr=0.1")
    assert run.config.method.options == {"mu": 1.0}
    assert (run.config.training.lr, run.config.model.hidden) == (0.1, (5, 4))


@pytest.mark.slow
def test_the_same_population_or_one_for_every_seed() -> None:
    """With vary="split" a run is `fit`'s on a task with that seed; control: the default is not."""
    task = hospitals()
    apart = fs.compare(task, Net, ["fedavg"], seeds=[2], jobs=1, vary="split", **FAST)
    stays = fs.compare(task, Net, ["fedavg"], seeds=[2], jobs=1, **FAST)
    alone = fs.fit(replace(task, seed=2), Net, seed=2, **FAST)
    assert files(folder_of(apart, "fedavg", 2)) == files(alone.folder)
    assert files(folder_of(stays, "fedavg", 2)) != files(alone.folder)
    assert "each cuts the data into clients and target anew" in apart.notes[0]


@pytest.mark.slow
def test_an_instance_starts_every_seed_alike_and_is_not_changed() -> None:
    net = nn.Linear(4, 2)
    before = net.weight.detach().clone()
    table = fs.compare(hospitals(), net, ["fedavg"], seeds=2, jobs=1, **FAST)
    assert torch.equal(net.weight, before)
    assert any("Every seed starts from the weights" in note for note in table.notes)
    function = fs.compare(hospitals(), Net, ["fedavg"], seeds=1, jobs=1, **FAST)
    assert not any("Every seed starts" in note for note in function.notes)


@pytest.mark.slow
def test_in_its_folder_it_goes_on(tmp_path: Path) -> None:
    """Complete runs are kept as they are; another network has runs of its own."""
    task = hospitals()
    first = fs.compare(task, Net, ["fedavg"], seeds=1, jobs=1, folder=tmp_path / "o", **FAST)
    (run,) = (tmp_path / "o" / "runs").iterdir()
    written = (run / "summary.json").stat().st_mtime_ns
    more = fs.compare(task, Net, ["fedavg"], seeds=2, jobs=1, folder=tmp_path / "o", **FAST)
    assert (run / "summary.json").stat().st_mtime_ns == written
    assert more.rows[0].values("target_loss")[0] == first.rows[0].values("target_loss")[0]
    assert len(list((tmp_path / "o" / "runs").iterdir())) == 2
    fs.compare(task, wider, ["fedavg"], seeds=1, jobs=1, folder=tmp_path / "o", **FAST)
    assert len(list((tmp_path / "o" / "runs").iterdir())) == 3


def wider(task: fs.Task) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Linear(9, len(task.classes)))


def test_another_task_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    fs.compare(hospitals(), Net, ["fedavg"], seeds=1, jobs=1, folder=tmp_path, **FAST)
    with pytest.raises(InputError, match="trained on other data"):
        fs.compare(hospitals(n=300), Net, ["fedavg"], seeds=1, jobs=1, folder=tmp_path, **FAST)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["client", "class"])
def test_other_names_in_the_same_folder_are_refused(tmp_path: Path, of: str) -> None:
    """Of a complete run and of one under way; the same names go on."""
    x, y, site = rows(100)
    y_now, site_now = y, ["a" if s == "east" else s for s in site]
    if of == "class":
        y_now, site_now = np.where(y == "ill", "bad", y), site
    task = fs.Task.from_arrays(x, y, client=site, target="north")
    renamed = fs.Task.from_arrays(x, y_now, client=site_now, target="north")
    assert task.build().data.sha256 == renamed.build().data.sha256
    keys: dict[str, Any] = {"seeds": 1, "jobs": 1, "folder": tmp_path / "table", **FAST}
    for given in (task, task):
        fs.compare(given, Net, ["fedavg"], **keys)
    now, was = ("a", "east") if of == "client" else ("bad", "ill")
    with pytest.raises(InputError, match=f'there "{now}" was named "{was}"; give another folder'):
        fs.compare(renamed, Net, ["fedavg"], **keys)
    one: dict[str, Any] = {**FAST, "folder": tmp_path / "run", "resume": True, "progress": False}
    for given in (task, task):
        fs.fit(given, Net, **one)
    with pytest.raises(InputError, match="a complete run of other names of clients or classes"):
        fs.fit(renamed, Net, **one)
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been stopped
    with pytest.raises(InputError, match="the names of clients and classes are not those with wh"):
        fs.fit(renamed, Net, **one)
    fs.fit(task, Net, **one)


def test_an_interruption_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*given: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedshift.sweeps.execute.perform", stopped)
    with pytest.raises(KeyboardInterrupt) as caught:
        fs.compare(hospitals(), Net, ["fedavg"], seeds=1, jobs=1, folder=tmp_path / "o", **FAST)
    assert "goes on from here" in caught.value.__notes__[0]
    monkeypatch.undo()
    again = fs.compare(hospitals(), Net, ["fedavg"], seeds=1, jobs=1, folder=tmp_path / "o", **FAST)
    assert again.rows[0].moments is not None


@pytest.mark.slow
def test_methods_by_names_of_ones_choice_and_a_failure_that_names_the_client() -> None:
    def bad(setting: Setting) -> Method:
        return replace(fedprox(setting, mu=0.0), local=replace(setting.local, lr=3e38))  # type: ignore[type-var]

    table = fs.compare(
        hospitals(), Net, {"plain": "fedavg", "much too fast": bad}, seeds=1, jobs=2, **FAST
    )
    assert [row.label for row in table.rows] == ["plain", "much too fast"]
    assert table.rows[1].moments is None
    assert table.rows[1].note.startswith('seed 0 diverged: client "')


@pytest.mark.slow
def test_it_leaves_threads_and_no_temporary_folder() -> None:
    torch.set_num_threads(2)
    table = fs.compare(hospitals(), Net, ["fedavg"], seeds=1, jobs=1, **FAST)
    assert torch.get_num_threads() == 2
    place = table.folder
    assert (place / "compare.html").is_file()
    del table
    gc.collect()
    assert not place.exists()


@pytest.mark.parametrize(
    ("methods", "more", "why"),
    [
        ("fedavg", {}, 'methods is the text "fedavg"; give a list'),
        ([], {}, "methods is empty"),
        (["fedavgg"], {}, 'unknown method "fedavgg".*Did you mean "fedavg"'),
        (["fedavg", "fedavg"], {}, "methods: fedavg is there twice; name them"),
        (["fedavg"], {"mu": 0.1}, 'fedavg has no option "mu"'),
        (["fedavg"], {"ruonds": 3}, 'no keyword "ruonds". Did you mean "rounds"'),
        (["fedavg"], {"seeds": 0}, "seeds"),
        (["fedavg"], {"seeds": []}, "seeds is empty"),
        (["fedavg"], {"vary": "all"}, 'unknown thing to vary "all"'),
        (["fedavg"], {"base": "fedpals"}, 'unknown method to compare with "fedpals"'),
        (["fedavg"], {"jobs": 0}, "jobs = 0; give 1 or more"),
        (["fedavg"], {"lr": [0.1, 0.2], "rule": "validation"}, "no examples that follow"),
        (["fedavg"], {"lr": []}, r"lr=\[\]: must be a number"),
        (["fedavg", "krum"], {}, "krum: . clients' changes are too few"),
    ],
)
def test_what_is_refused(methods: Any, more: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        fs.compare(hospitals(), Net, methods, **(FAST | more))


AFTER_THREADS = """
import sys
import torch
import fedshift as fs

torch.set_num_threads(2)
x, y = torch.randn(400, 64), [i % 2 for i in range(400)]
torch.randn(600, 600) @ torch.randn(600, 600)  # starts the pool of threads
task = fs.Task.from_arrays(x, y, client=[i % 4 for i in range(400)], target="3")
table = fs.compare(task, "mlp", ["fedavg"], seeds=2, jobs=2, hidden=(256,), rounds=1)
print(len(table.runs))
"""


@pytest.mark.slow
def test_copies_of_a_process_with_threads_do_not_wait_for_them() -> None:
    given = [sys.executable, "-c", AFTER_THREADS]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr


@pytest.mark.slow
def test_fedpals_chooses_its_ess_unless_it_is_given() -> None:
    chosen = fs.fit(hospitals(), Net, method="fedpals", progress=False, **FAST)
    assert chosen.summary.selection is not None
    given = fs.fit(hospitals(), Net, method="fedpals", ess=0.5, progress=False, **FAST)
    assert given.summary.selection is None
