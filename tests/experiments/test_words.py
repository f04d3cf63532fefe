"""The same mistake in a file and in Python: messages name keys there, and arguments here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import Local, Model, pals_weights, recipes, shifts
from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.diagnose import diagnose
from fedshift.errors import InputError
from fedshift.experiments.config.load import dumps, load_config
from fedshift.experiments.config.places import Source
from fedshift.experiments.config.wording import file_words
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.server.rows import slot_table
from fedshift.shifts.target import check_marginal
from support.broken_inputs import GOOD

MODEL = Model(Mlp((4,), (5,), 3))
SHARES = (0.2, 0.3, 0.5)
COUNTS = [[1, 2, 3], [3, 2, 1]]
Y = np.arange(30) % 3


def setting(**given: Any) -> Setting:
    return Setting(MODEL, SHARES, **given)


WITH_INPUTS = setting(server_inputs=torch.zeros(9, 4))


def dealt(shift: shifts.Shift, clients: int = 3) -> Any:
    return shift(Y, 3, clients, np.random.default_rng(0))


def method(text: str) -> tuple[str, str]:
    return 'name = "fedavg"', text


def training(text: str) -> tuple[str, str]:
    return "rounds = 1", f"rounds = 1\n{text}"


def shift(text: str) -> tuple[str, str]:
    return 'kind = "sparsity"\nlabels_per_client = 3', text


# A change of GOOD -> how its answer begins; the same mistake in Python -> what its answer names.
CASES: list[tuple[tuple[str, str], str, Callable[[], object], str]] = [
    (
        method('name = "fedprox"\nmu = -1.0'),
        "f.toml:9: method.mu must be 0 or more, got -1.0",
        lambda: recipes.fedprox(setting(), mu=-1.0),
        "mu must be 0 or more",
    ),
    (
        method('name = "fedtrimmed"\nshare = 0.7'),
        "f.toml:9: method.share must be at least 0 and less than 0.5",
        lambda: recipes.fedtrimmed(setting(), share=0.7),
        "share must be at least 0",
    ),
    (
        method('name = "fedrs"\nalpha = 2.0'),
        "f.toml:9: method.alpha must be in [0, 1)",
        lambda: recipes.fedrs(setting(), alpha=2.0),
        "RestrictedSoftmax alpha must be",
    ),
    (
        method('name = "fedpals"\ncap = 0.05\ness = 0.5'),
        "f.toml:9: method.cap = 0.05 cannot be met",
        lambda: pals_weights(COUNTS, SHARES, ess=0.5, cap=0.05),
        "cap=0.05 cannot be met",
    ),
    (
        method('name = "fedpals"\ness = 0.5\nlam = 1.0'),
        "f.toml:10: give exactly one of lam and ess; got both (method.lam = 1.0, method.ess = 0.5)",
        lambda: recipes.fedpals(setting(), ess=0.5, lam=1.0),
        "got both (lam=1.0, ess=0.5)",
    ),
    (
        method('name = "afl"\ndomains = [0, 1]'),
        "f.toml:9: method.domains names 2 clients, the federation has 9",
        lambda: recipes.afl(setting(), domains=(0, 2)),
        "domains must be numbered 0..D-1",
    ),
    (
        method('name = "krum"\nbyzantine = 5'),
        "f.toml:9: 9 clients' changes are too few for method.byzantine = 5",
        lambda: recipes.krum(setting(), byzantine=-1),
        "byzantine must be 0 or more, got -1",
    ),
    (
        method('name = "feddisk"'),
        "f.toml:10: training.rounds = 1, of which the first 21 fit densities and weigh examples "
        "(density_rounds + weighing_rounds), leave none to train; for T rounds of training give "
        "training.rounds = 21 + T",
        lambda: recipes.feddisk(setting(rounds=1)),
        "for T rounds of training give Setting(rounds=21 + T)",
    ),
    (
        method('name = "fedavgft"\ntune_rounds = 3'),
        "f.toml:9: method.tune_rounds = 3 of 1 rounds leave none",
        lambda: recipes.fedavgft(setting(rounds=1), tune_rounds=3),
        "tune_rounds=3 of 1 rounds",
    ),
    (
        method('name = "fedavgm"\n[training]\nserver_momentum = 0.5\n[model]\n'),
        'f.toml:10: fedavgm sets the server\'s momentum: leave out training.server_momentum',
        lambda: recipes.fedavgm(setting(server=recipes.setting.Sgd(momentum=0.5))),
        "leave it out of Sgd(lr=1.0, momentum=0.5)",
    ),
    (
        method('name = "labelset_fedavg"\ntune = "mse"'),
        'f.toml:9: method.tune = "mse" needs unlabeled inputs on the server; give server.unlabeled',
        lambda: recipes.labelset_fedavg(setting(), tune="mse"),
        "give Setting(..., server_inputs=x)",
    ),
    (
        method('name = "labelset_fedavg"\ntune = "kl"\ntune_temperature = "fitted"\n[server]\n'
               "unlabeled = 10"),
        'f.toml:10: method.tune_temperature = "fitted" needs labelled examples on the server; give '
        "server.validation = n, the number of examples that the server holds",
        lambda: recipes.labelset_fedavg(
            setting(server_inputs=torch.zeros(5, 1)), tune="kl", tune_temperature="fitted"
        ),
        "give Setting(..., server_examples=fedshift.data.Examples(x, y))",
    ),
    (
        method('name = "labelset_fedavg"\ntune_rounds = 3'),
        'f.toml:9: method.tune_rounds changes nothing with method.tune = "none"; set',
        lambda: recipes.labelset_fedavg(setting(), tune_rounds=3),
        'set tune="kl", "mse" or "pairwise", or leave tune_rounds out',
    ),
    (
        method('name = "labelset_ditto"\ntune = "kl"\ntune_stop = "held-out"\n[server]\n'
               "unlabeled = 4"),
        'f.toml:10: method.tune_stop = "held-out" holds out every fifth input of the server, which',
        lambda: recipes.labelset_ditto(
            setting(server_inputs=torch.zeros(4, 1)), tune="kl", tune_stop="held-out"
        ),
        "which has 4; give it 5 or more, or leave tune_stop out",
    ),
    (
        method('name = "labelset_fedavg"\ntune = "kl"\ntune_rounds = -1\n[server]\nunlabeled = 9'),
        "f.toml:10: method.tune_rounds must be 0 or more, got -1",
        lambda: recipes.labelset_fedavg(WITH_INPUTS, tune="kl", tune_rounds=-1),
        "tune_rounds must be 0 or more, got -1",
    ),
    (
        method('name = "labelset_fedavg"\ntune = "kl"\ntune_lr = 0.0\n[server]\nunlabeled = 9'),
        "f.toml:10: method.tune_lr must be a positive number, got 0.0",
        lambda: recipes.labelset_fedavg(WITH_INPUTS, tune="kl", tune_lr=0.0),
        "tune_lr must be a positive number, got 0.0",
    ),
    (
        method('name = "labelset_fedavg"\ntune = "kl"\ntune_steps = -1\n[server]\nunlabeled = 9'),
        "f.toml:10: method.tune_steps must be 0 or more, got -1",
        lambda: recipes.labelset_fedavg(WITH_INPUTS, tune="kl", tune_steps=-1),
        "tune_steps must be 0 or more, got -1",
    ),
    (
        method('name = "labelset_fedavg"\nslots = 2'),
        "f.toml:9: method.slots = 2 is too few, as client 0 holds 3 labels; give at least 3, or "
        "leave slots out",
        lambda: slot_table(torch.ones(1, 3).bool(), 2, seed=0),
        "slots=2 is too few, as client 0 holds 3 labels; give at least 3, or leave slots out",
    ),
    (
        method('name = "labelset_fedavg"\ntune = "kl"\ntune_steps = 0\ntune_moments = "kept"\n'
               "[server]\nunlabeled = 9"),
        "f.toml:11: method.tune_moments changes nothing with method.tune_steps = 0; set ",
        lambda: recipes.labelset_fedavg(
            WITH_INPUTS, tune="kl", tune_steps=0, tune_moments="kept"
        ),
        "tune_moments changes nothing with tune_steps=0; set tune_steps to 1 or more, or leave",
    ),
    (
        method('name = "feddisk"\nestimator = "equal"\ntemper = 0.5'),
        'f.toml:10: method.temper changes nothing with method.estimator = "equal"',
        lambda: recipes.feddisk(setting(), estimator="equal", temper=0.5),
        'set estimator="direct" or "classifier", or leave temper out',
    ),
    (
        method('name = "feddisk"\nratio_epochs = 5'),
        'f.toml:9: method.ratio_epochs changes nothing with method.estimator = "direct"',
        lambda: recipes.feddisk(setting(), ratio_epochs=5),
        'set estimator="classifier", or leave ratio_epochs out',
    ),
    (
        method('name = "feddisk"\nestimator = "equal"\ndensity_epochs = 3'),
        'f.toml:10: method.density_epochs changes nothing with method.estimator = "equal"',
        lambda: recipes.feddisk(setting(), estimator="equal", density_epochs=3),
        'set estimator="direct" or "classifier", or leave density_epochs out',
    ),
    (
        method('name = "feddisk"\nestimator = "true"\nordering = "random"'),
        'f.toml:10: method.ordering changes nothing with method.estimator = "true"',
        lambda: recipes.feddisk(setting(), estimator="true", ordering="random"),
        'set estimator="direct" or "classifier", or leave ordering out',
    ),
    (
        method('name = "feddisk"\nestimator = "equal"\nmost = 4.0'),
        'f.toml:10: method.most changes nothing with method.estimator = "equal"; set ',
        lambda: recipes.feddisk(setting(), estimator="equal", most=4.0),
        'set estimator="direct" or "classifier" or "true", or leave most out',
    ),
    (
        method('name = "feddisk"\nleast_ess = 0.2'),
        "f.toml:9: method.least_ess = 0.2 ends no run where method.useful = 0.3: weights worth",
        lambda: recipes.feddisk(setting(), least_ess=0.2),
        "least_ess=0.2 ends no run where useful=0.3: weights worth less than useful are 1 before",
    ),
    (
        method('name = "feddisk"\ntau = 0.2'),
        "f.toml:9: method.tau is the temperature of MOON's term, and with method.mu = 0 there is",
        lambda: recipes.feddisk(setting(), tau=0.2),
        "with mu=0 there is none; set mu above 0, or leave tau out",
    ),
    (
        method('name = "afl"\nwhole = true'),
        "f.toml:9: method.whole is for domains of several clients, and without domains each client",
        lambda: recipes.afl(setting(), whole=True),
        "give domains, or leave whole out",
    ),
    (
        method('name = "labelset_fedavg"\ntune = "kl"\ntune_over = "union"'),
        'f.toml:9: method.tune = "kl"',
        lambda: recipes.labelset_fedavg(setting(), tune="kl", tune_over="union"),
        'tune = "kl" needs unlabeled inputs',
    ),
    (
        (GOOD[GOOD.index("[method]") :], '[training]\nrounds = 1\nmomentum = 0.5\n[method]\n'
         'name = "scaffold"\n'),
        "f.toml:9: SCAFFOLD option II takes (theta - y) / (lr * steps) for the mean gradient, "
        'wrong with momentum 0.5; give training.momentum = 0, or use method.option = "I"',
        lambda: recipes.scaffold(setting(local=Local(momentum=0.5))),
        'give Local(momentum=0), or use option="I"',
    ),
    (
        shift('kind = "sparsity"\ntarget = [0.5, 0.5]'),
        "f.toml:6: shift.target has 2 numbers; allowed: one for each of 10 classes.",
        lambda: pals_weights(COUNTS, [0.5, 0.5], lam=1.0),
        "target must have one entry per class",
    ),
    (
        shift("target = [2, 1, 0, 0, 0, 0, 0, 0, 0, 0]"),
        "f.toml:5: shift.target sums to 3; allowed: 1 within 1e-6. Divide counts by their sum. Or "
        "set shift.normalise_target = true.",
        lambda: pals_weights(COUNTS, [2, 1, 0], lam=1.0),
        "or normalise_target=True to have it divided by its sum",
    ),
    (
        shift("target = [nan, 1, 0, 0, 0, 0, 0, 0, 0, 0]"),
        "f.toml:5: shift.target[0]=nan; allowed: finite numbers >= 0",
        lambda: check_marginal([float("nan"), 1, 0], 3),
        "marginal[0]=nan",
    ),
    (
        shift('kind = "dirichlet-per-class"\nbeta = 1e-9'),
        "f.toml:6: shift.beta = 1e-09; allowed: a number from 1e-06 to 1e+06 (small: very unequal; "
        'large: close to equal). Use shift.kind = "iid"',
        lambda: shifts.DirichletPerClass(1e-9),
        "beta=1e-09; allowed: a number from 1e-06 to 1e+06 (small: very unequal; large: close to "
        "equal). Use Iid()",
    ),
    (
        shift('kind = "shards"\nshards_per_client = 9999'),
        "f.toml:6: shift.shards_per_client = 9999 for 10 clients makes 99990 shards of 7000 "
        "samples; allowed: shift.shards_per_client up to 700. They are shift.clients = 9 and the "
        "target, drawn as one.",
        lambda: dealt(shifts.Shards(per_client=9999)),
        "per_client=9999 for 3 clients makes",
    ),
    (
        shift('kind = "label-sets"\nsamples = 50\nreach = 2'),
        "f.toml:7: shift.reach = 2 of shift.labels_per_client = 3 has 20 different sets of 10 "
        "labels, and there are 10 clients; give 20 or more, or a smaller reach. They are "
        "shift.clients = 9 and the target, drawn as one.",
        lambda: dealt(shifts.LabelSetSplit(2, samples=5, reach=1), clients=2),
        "reach=1 of labels_per_client=2 has",
    ),
    (
        shift('kind = "label-sets"\ncommon_labels = 20'),
        "f.toml:6: shift.common_labels = 20; allowed: a whole number from 0 to 3.",
        lambda: shifts.LabelSetSplit(3, common=20),
        "common=20; allowed",
    ),
    (
        shift('kind = "sparsity"\nclients = 9000\ntarget = "uniform"'),
        "f.toml:6: shift.clients = 9000; allowed: a whole number from 1 to 7000",
        lambda: dealt(shifts.Iid(), 31),
        "clients=31; allowed: a whole number from 1 to 30",
    ),
    (
        training('cohort = 12'),
        "f.toml:11: training.cohort = 12: a cohort of 12 clients from 9; give 1 to 9",
        lambda: recipes.krum(setting(), byzantine=True),
        "byzantine must be a whole number",
    ),
]  # fmt: skip


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The error message of the command line."""
    assert perform(app, list(args)) == 2
    return capsys.readouterr().err.partition("error: ")[2].rstrip("\n")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("change", "words", "call", "named"), CASES, ids=[c[1][:45] for c in CASES]
)
def test_messages_name_keys_with_lines_in_files_and_arguments_in_python(
    change: tuple[str, str],
    words: str,
    call: Callable[[], object],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = GOOD.replace(*change)
    if text.count("[training]") == 2:
        text = text[: text.rindex("[training]")]
    Path("f.toml").write_text(text)
    assert answer(capsys, "run", "f.toml", "--out", "o").startswith(words)
    assert not Path("o").exists()
    with pytest.raises(InputError) as caught:
        call()
    assert named in str(caught.value)
    assert not any(f"{section}." in str(caught.value) for section in ("method", "training"))


def test_options_are_named_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.csv").write_text("cat,dog\n1,2\n")
    Path("t.csv").write_text("cat,dog\n0.3,0.3\n")  # whole numbers would be counts
    files = ("diagnose", "--counts", "c.csv", "--target", "t.csv")
    assert answer(capsys, *files).endswith("or --normalise to have it divided by its sum")
    assert answer(capsys, *files, "--normalise", "--cap", "2").startswith("--cap must be a weight")
    assert answer(capsys, *files, "--normalise", "--bootstrap", "5").startswith("--bootstrap: ")
    with pytest.raises(InputError, match=r"or normalise_target=True to have it"):
        diagnose([[1, 2]], [0.3, 0.3])


@pytest.mark.slow
def test_what_is_set_by_an_option_is_placed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.toml").write_text(GOOD)
    run = ("run", "f.toml", "--out", "o", "-c")
    assert answer(capsys, *run, "training.cohort=12").startswith(
        "-c training.cohort = 12: a cohort"
    )
    assert answer(capsys, *run, "shift.target=[1]").startswith("-c shift.target has")


@pytest.mark.slow
def test_every_command_that_reads_a_file_names_the_line_of_what_it_meets_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.toml").write_text(GOOD.replace('kind = "sparsity"', 'kind = "sparsity"\ntarget = [1]'))
    assert answer(capsys, "demo", "-c", "training.cohort=99", "--out", "o").startswith(
        "-c training.cohort = 99: a cohort"
    )
    assert answer(capsys, "audit", "marginals", "t.toml").startswith("t.toml:6: shift.target has")
    run = Path("o")
    run.mkdir()
    resolved = dumps(load_config(Path("t.toml")))
    (run / "config.resolved.toml").write_text(resolved)
    (run / "lock.json").write_text('{"format": 1}')
    line = resolved.splitlines().index("target = [1.0]") + 1
    assert answer(capsys, "run", "--resume", "o").startswith(
        f"o/config.resolved.toml:{line}: shift.target has"
    )


def test_what_cannot_be_deployed_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
    monkeypatch.chdir(tmp_path)
    Path("f.toml").write_text(GOOD)
    error = answer(
        capsys,
        "deploy",
        "init",
        "f.toml",
        "d",
        "-c",
        "training.keep=best",
        "-c",
        "shift.target=clients",
    )
    assert error.startswith('-c training.keep = "best" may keep an earlier round')


def test_a_failed_run_of_a_table_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    part = ("--rounds", "1", "--seeds", "0", "--methods", "fedavg", "--split", "C=3")
    cell = ("reproduce", "fedpals/table1", "--dataset", "fashion-mnist-mini", *part)
    assert perform(app, [*cell, "-c", "training.cohort=99"]) == 4
    assert ": -c training.cohort = 99: a cohort of 99" in capsys.readouterr().err


def test_a_message_is_placed_by_keys_alone() -> None:
    source = Source("f.toml", "[model]\nname = 'mlp'\n[training]\nrounds = 3\n")
    assert source.about((), "training.rounds = 3 is odd") == ("training", "rounds")
    assert source.about((), "no method.mu, nor [training]") == ("training",)
    for elsewhere in (
        "o/model.safetensors",
        "fedshift.model.name",
        "more data.",
        "names",
        "rounds",
    ):
        assert source.about((), elsewhere) == ()
    assert source.place(("training", "rounds")) == "f.toml:4"


def test_arguments_that_are_words_too_are_left_in_prose() -> None:
    names = {"share": "share", "keep": "keep"}
    sentence = "clients share what they keep; share=0.7 is too much, share and keep out"
    rewritten = "clients share what they keep; method.share = 0.7 is too much, share and keep out"
    assert file_words(sentence, "method", names) == rewritten
    assert file_words("more data.", "method", names) == "[method]: more data."


def test_a_word_that_toml_takes_for_a_boolean_is_named_as_text(tmp_path: Path) -> None:
    """The hint was "did you mean" what had been written; of other booleans there is none."""
    file = tmp_path / "f.toml"
    file.write_text(GOOD.replace('"fedavg"', '"feddisk"'), encoding="utf-8")
    words = r'It is a text, in quotes: estimator = "true"; after -c, \'method.estimator="true"\'\.$'
    with pytest.raises(InputError, match=words):
        load_config(file, ["method.estimator=true"])
    with pytest.raises(InputError, match=r"allowed are direct, classifier, true, equal\.$"):
        load_config(file, ["method.estimator=false"])
    quoted = load_config(file, ['method.estimator="true"', "training.rounds=30"])
    assert quoted.method.options["estimator"] == "true"
