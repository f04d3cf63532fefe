"""Two rounds of every kind of column and row of FedDRM's tables and figures, on made-up images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.folder.summary import summary
from fedshift_papers.reproduce.catalogue import study
from fedshift_papers.reproduce.plan import Plan, config_of
from support.made_up_images import write_images

SMALL = ("model.name=lenet-gn-small",)
FEW = ("training.steps=5", "training.batch=4")
CASES = [
    ("table1", "cifar-20", "Dir=0.3", "FedPAC"),
    ("table1", "cifar-100", "SPC=25", "FedAS"),
    ("table2", "cifar-10", "SPC=5", "FedSAMFT"),
    ("table2", "cifar-100", "Dir=0.3", "Ditto"),
    ("table2", "cifar-20", "SPC=25", "FedProxFT"),
    ("table3", "cifar-10", "M=16", "FedDRM, system"),
    ("table3", "cifar-10", "M=32", "FedAvgFT, average"),
    ("table4", "cifar-10", "Dir=1.3", "FedBABU, system"),
    ("table4", "cifar-10", "Dir=2.3", "ConFREE, average"),
    ("fig3-body", "cifar-10", "Dir=0.3", "Client loss"),
    ("fig4", "cifar-10", "Dir=0.3", "lambda=0.1, client"),
    ("fig5", "cifar-10", "shift=mid", "FedDRM, average"),
    ("fig5", "cifar-10", "shift=high", "FedDRM, client"),
    *(("fig6", "cifar-10", f"shared={level}", "FedDRM, system")
      for level in ("deep", "mid", "shallow", "none")),
    ("fig7", "retina", "M=3", "FedDRM, system"),
    ("fig7", "retina", "M=3", "FedALA, average"),
    ("lenet", "cifar-10", "SPC=5", "FedRep, vote"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield write_images(tmp_path_factory.mktemp("pictures"), patch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dataset", "split", "label"), CASES)
def test_a_cell_can_be_run(name: str, dataset: str, split: str, label: str) -> None:
    table = study(f"feddrm/{name}")
    column = next(c for c in table.columns if (c.dataset, c.split) == (dataset, split))
    row = next(r for r in table.rows if r.label == label)
    smaller = SMALL if column.settings["model"]["name"] == "resnet18-projected" else ()
    plan = Plan(table, rounds=2 * table.rounds // column.rounds, overrides=(*FEW, *smaller))
    assert plan.problem(row, column) is None
    done = run_experiment(config_of(plan, row, column, {}, 0))
    assert done.outcome.last.t == 2
    last = summary(done).last
    assert last is not None
    value = last[row.reads or table.metric.key]
    drift = table.metric.key.startswith("drift")
    assert value > 0 if drift else 0 <= value <= 1
