"""From an experiment file to the runs of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshift.errors import InputError
from fedshift.experiments.config.load import load_with_source
from fedshift.experiments.task.from_files import custom_of
from fedshift.experiments.task.preparing import prepare
from fedshift.sweeps.from_file import plan_of
from support.small_runs import text_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "f.toml"
    path.write_text(text_of("fedavg"))
    return path


def test_lists_span_a_grid_for_the_methods_that_have_the_option(file: Path) -> None:
    plan, _ = plan_of(
        file, ["fedavg", "fedprox"], [0, 3], ["training.lr=0.01,0.1", "method.mu=0.1,1"]
    )
    labels = {c.label: [p.label for p in c.points] for c in plan.contenders}
    assert labels == {
        "fedavg": ["lr=0.01", "lr=0.1"],
        "fedprox": ["lr=0.01, mu=0.1", "lr=0.01, mu=1", "lr=0.1, mu=0.1", "lr=0.1, mu=1"],
    }
    assert len(plan.runs) == 12
    run = plan.contenders[1].points[2].runs[3]
    assert (run.config.training.lr, run.config.method.options) == (0.1, {"mu": 0.1})


def test_options_of_the_files_method_are_for_it_alone(tmp_path: Path) -> None:
    """Also beside FILE.py:NAME; control: its options stay, and those of -c are checked."""
    file = tmp_path / "f.toml"
    file.write_text(text_of("fedpals").replace("ess = 0.9", 'ess = "auto"\ncap = 0.9'))
    (tmp_path / "mine.py").write_text(
        "from fedshift.recipes import fedavg, fedpals\n"
        "def plain(setting, *, mu=0.1):\n    return fedavg(setting)\n"
        "def capped(setting, *, cap=1.0, ess=0.5):\n    return fedpals(setting, cap=cap)\n"
    )
    plain, capped = (f"{tmp_path / 'mine.py'}:{name}" for name in ("plain", "capped"))
    plan, _ = plan_of(file, ["fedavg", "fedpals", plain, capped], [0])
    given = {c.label: c.points[0].runs[0].config.method.options for c in plan.contenders}
    assert given == {
        "fedavg": {}, "fedpals": {"ess": "auto", "cap": 0.9}, "plain": {}, "capped": {"cap": 0.9},
    }  # fmt: skip
    config, _ = load_with_source(file, [f"method.name={plain}", "method.ess=0.5"])
    with pytest.raises(InputError, match="method.ess: plain in .* has no such"):
        custom_of(config)


def test_training_varies_and_the_population_stays(file: Path) -> None:
    """Control: with vary="split" the cut has the run's seed."""
    for vary, split in (("training", 0), ("split", 4)):
        plan, _ = plan_of(file, [], [4], vary=vary)
        (point,) = plan.points
        seeds = point.runs[4].config.seeds.resolved()
        assert (seeds.split, seeds.init, seeds.cohort, seeds.batch) == (split, 4, 4, 4)
        assert (" stay the same" in plan.varied) == (vary == "training")


def test_each_client_of_a_table_is_the_target_in_turn(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("site,x,ill\n" + "a,1,0\na,2,1\nb,3,0\nb,4,1\nc,5,0\n")
    file = tmp_path / "f.toml"
    file.write_text(
        'data = { source = "t.csv", client = "site", label = "ill", target = "pooled" }\n'
        'model.name = "linear"\nmethod.name = "fedavg"\ntraining.rounds = 1\n'
    )
    plan, _ = plan_of(file, [], [0], vary="target")
    (point,) = plan.points
    assert plan.targets == ("a", "b", "c")
    assert [point.runs[i].config.data.target for i in plan.seeds] == ["a", "b", "c"]
    single, _ = plan_of(file, [], [0], ["data.target=b"])
    assert [*single.runs] == [point.runs[1].name]  # the run that data.target alone would make
    few, _ = plan_of(file, [], [0], vary="target", targets=["c", "b"])
    assert few.targets == ("c", "b")
    assert next(few.points).runs[1].name == point.runs[1].name
    assert few.about == ("Each target is tested on 1 to 2 rows.",)
    bare = tmp_path / "bare.toml"  # a file that names no target
    bare.write_text(file.read_text().replace(', target = "pooled"', ""))
    assert next(plan_of(bare, [], [0], vary="target")[0].points).runs[1].name == point.runs[1].name
    with pytest.raises(InputError, match="data.target is missing"):
        prepare(load_with_source(bare)[0])
    with pytest.raises(InputError, match="there is one seed; give --seeds 0"):
        plan_of(file, [], [0, 1], vary="target")
    with pytest.raises(InputError, match='"d" is no client'):
        plan_of(file, [], [0], vary="target", targets=["d"])
    with pytest.raises(InputError, match="--targets is for --vary target; add that"):
        plan_of(file, [], [0], targets=["c"])


def test_the_servers_labelled_rows_choose_where_its_model_is_used(tmp_path: Path) -> None:
    """Refused where clients serve models of their own. Control: a target elsewhere."""
    (tmp_path / "t.csv").write_text("site,x,ill\n" + "a,1,0\na,2,1\nb,3,0\nb,4,1\n")
    file = tmp_path / "f.toml"
    file.write_text(
        'data = { source = "t.csv", client = "site", label = "ill", target = "pooled" }\n'
        'model.name = "linear"\nmethod.name = "fedavg"\ntraining.rounds = 1\n'
        'server.validation = 2\nselection.rule = "validation"\n'
    )
    grid = ["training.lr=1,2"]
    assert len(plan_of(file, [], [0], grid)[0].runs) == 2
    with pytest.raises(InputError, match="each client serves its own, .* selection.rule = .estim"):
        plan_of(file, [], [0], [*grid, "data.target=clients"])
    plan_of(file, [], [0], [*grid, "data.target=clients", "selection.rule=estimate"])
    with pytest.raises(InputError, match="no examples that follow the target are kept"):
        plan_of(file, [], [0], [*grid, "server.validation=0"])


@pytest.mark.parametrize(
    ("methods", "overrides", "more", "why"),
    [
        ("fedavgg", [], {}, 'unknown method "fedavgg"; .* Did you mean "fedavg"?'),
        ("fedavg", ["method.mu=1"], {}, "-c method.mu: none of fedavg has it; they have no opt"),
        ("fedprox", ["method.mi=1"], {}, r"-c method.mi: none of fedprox has it; they have method"),
        ("fedavg", ["method.name=fedprox"], {}, "-c method.name: compare sets it itself; use --me"),
        ("fedavg", ["seeds.run=1"], {}, "-c seeds.run: compare sets it itself; use --seeds"),
        ("fedavg", ["shift.clients=3,4"], {}, "-c shift.clients lists 2 values, and settings are"),
        ("fedavg", ["training.lr=1,2", "data.validation=0"], {}, "a grid is chosen by the client"),
        (
            "fedavg", ["training.lr=1,2", "selection.rule=validation", "shift.target=uniform"], {},
            "no examples that follow",
        ),
        ("fedavg", ["training.ruonds=1,2"], {}, "unknown key"),
        ("fedavg,fedavg", [], {}, '"fedavg" is there twice'),
        ("fedavg", [], {"base": "fedpals"}, 'unknown method to compare with "fedpals"'),
        ("fedavg", [], {"vary": "all"}, 'unknown thing to vary "all"; allowed: split, target, t'),
        ("fedavg", [], {"vary": "target"}, "set data.source to a table, a folder, or"),
        ("fedavg", ["seeds.split=1"], {"vary": "split"}, "seeds.split = 1 is set"),
        (
            "fedpals", ["method.lam=1", "method.ess=0.5"], {},
            "-c method.lam: give exactly one of lam and ess; got both",
        ),
        (
            "fedavg", ["seeds.init=1", "seeds.cohort=1", "seeds.batch=1"], {},
            "every seed would train alike",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_compared(
    methods: str, overrides: list[str], more: dict[str, str], why: str, file: Path
) -> None:
    with pytest.raises(InputError, match=why):
        plan_of(file, methods.split(","), [0], overrides, **more)  # type: ignore[arg-type]


def test_a_method_of_the_users_file(file: Path) -> None:
    """It has a row by its name, and other runs once its file has changed."""
    mine = file.parent / "mine.py"
    text = "from fedshift.recipes import fedprox\n\n\ndef slow(setting, *, mu=0.1):\n"
    mine.write_text(text + "    return fedprox(setting, mu=mu)\n")
    names = ["fedavg", "mine.py:slow"]
    plan, _ = plan_of(file, names, [0], ["method.mu=0.1,1"])
    assert [c.label for c in plan.contenders] == ["fedavg", "slow"]
    assert [p.label for p in plan.contenders[1].points] == ["mu=0.1", "mu=1"]
    assert plan.runs == plan_of(file, names, [0], ["method.mu=0.1,1"])[0].runs
    mine.write_text(text + "    return fedprox(setting, mu=2 * mu)\n")
    later = plan_of(file, names, [0], ["method.mu=0.1,1"])[0]
    common = plan.runs.keys() & later.runs.keys()
    assert common == {plan.contenders[0].points[0].runs[0].name}


def test_fedpals_chooses_its_ess_unless_it_is_given(file: Path) -> None:
    plan, _ = plan_of(file, ["fedavg", "fedpals"], [0])
    assert [c.points[0].runs[0].config.method.options for c in plan.contenders] == [
        {},
        {"ess": "auto"},
    ]
    plan, _ = plan_of(file, ["fedpals"], [0], ["method.lam=3"])
    assert next(plan.points).runs[0].config.method.options == {"lam": 3}
