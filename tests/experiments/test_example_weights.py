"""What a run reports of the weights of its clients' examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import Model, recipes
from fedshift.client.importance import bounded, effective_size
from fedshift.data import client_data
from fedshift.engine.round import Round, before_rounds
from fedshift.experiments.config.load import validate
from fedshift.experiments.config.schema import Training
from fedshift.experiments.experiment import check_method, run_experiment
from fedshift.experiments.folder.summary import summary
from fedshift.experiments.measures.example_weights import (
    differing,
    importance,
    importance_sentences,
    untrained,
)
from fedshift.experiments.task.preparing import prepare
from fedshift.recipes import Setting
from fedshift.tree import Parts

MODEL = Model(torch.nn.Linear(4, 2))
SETTING = Setting(MODEL, (0.5, 0.5), shape=(4,))
TRAINING = Training(rounds=40, cohort=1)
N = 400


def disk(**options: Any) -> Any:
    return recipes.feddisk(SETTING, hidden=(4,), **options)


def after(server: Parts, states: dict[int, Parts] | None = None, t: int = 40) -> Round:
    return before_rounds(server)._replace(t=t, states=states or {})


def sentences_of(
    server: Parts, method: Any = None, training: Training = TRAINING, t: int = 40
) -> list[str]:
    return importance_sentences(method or disk(), after(server, t=t), training)


def sizes(n: list[float], ess: list[float], estimated: list[float] | None = None) -> Parts:
    rows = {"n": n, "ess": ess, "estimated": estimated or ess}
    return {"importance": {k: torch.tensor(v, dtype=torch.float64) for k, v in rows.items()}}


def test_missing_weights_are_not_reported() -> None:
    assert importance({"params": {}}) is None
    assert sentences_of({"params": {}}) == []
    assert importance_sentences(recipes.fedavg(SETTING), after({"params": {}}), TRAINING) == []
    rounded = importance(sizes([5.0], [5.001]))
    assert rounded is not None
    assert rounded["share"] == [1.0]
    some = sizes([10, 20, 5], [5, 0, 5])
    assert importance(some) == {"ess": [5.0, None, 5.0], "share": [0.5, None, 1.0]}
    first, idle, fair = sentences_of(some)
    assert fair == (
        "The first 21 of 40 rounds fit densities and weigh examples, and 19 train the model. "
        "FedAvg trains in all 40: a fair rival trains in as few, as feddisk with estimator = "
        '"equal" does.'
    )
    assert "75%" in first
    assert "1 client has not weighed its examples" in first
    assert idle.startswith("Importance weights of client 2 are worth 100 % of its examples, and ")
    none, _ = sentences_of(sizes([10, 20], [0, 0]))
    assert none.startswith("No client has weighed its examples: all count alike: give method.weigh")


def test_clients_that_no_weighing_round_drew_are_named_with_the_cure() -> None:
    text, _ = sentences_of(sizes([9, 9, 9], [5, 0, 0]))
    assert (
        "2 clients have not weighed their examples, which count alike: give "
        "method.weighing_rounds = 11 and training.rounds = 50, so that all are drawn in 95 % of "
        "runs." in text
    )
    # Controls: all have; some have no examples; the kept model is of an earlier round.
    assert "weighed" not in sentences_of(sizes([9, 9], [5, 5]))[0]
    assert "weighed" not in sentences_of(sizes([9, 0], [5, 0]))[0]
    assert "weighing_rounds" not in sentences_of(sizes([9, 9], [5, 0]), t=20)[0]
    assert (
        "weighing_rounds = 2"
        in sentences_of(sizes([9, 9], [5, 0]), training=Training(rounds=40))[0]
    )


def test_the_control_says_nothing_against_itself() -> None:
    """Weights of 1 by `equal` are intended; equal estimated weights change nothing."""
    even = sizes([9, 9], [9, 9])
    assert sentences_of(even, disk(estimator="equal")) == [
        "Every example weighs 1: this is the control, without estimated weights."
    ]
    assert any("change nothing" in text for text in sentences_of(even))
    assert any("change nothing" in text for text in sentences_of(even, disk(estimator="true")))
    left = sentences_of(sizes([9, 9], [9, 0]), disk(estimator="equal"))
    assert not any("weighing_rounds" in text for text in left)


def test_rounds_that_train_no_model_are_named_beside_a_comparison() -> None:
    (text,) = untrained("feddisk", disk(density_rounds=2), 30)
    assert text.startswith("feddisk: the first 3 of 30 rounds fit densities and weigh examples, ")
    assert "and 27 train the model" in text
    assert untrained("feddisk", disk(estimator="equal"), 30) == []
    assert untrained("fedavg", recipes.fedavg(SETTING), 30) == []


@pytest.mark.slow
def test_a_comparison_notes_them() -> None:
    """What `fedshift compare` and `fs.compare` put at the foot of their tables."""
    for name, idle in (("feddisk", True), ("fedavg", False)):
        config = validate(
            {
                "data": {"name": "binary-world", "validation": 0.0},
                "shift": {"kind": "natural", "clients": 3},
                "model": {"name": "linear"},
                "method": {"name": name},
                "training": {"rounds": 30, "steps": 1},
            }
        )
        notes = check_method(config.method, config.training, prepare(config))
        assert any("9 train the model" in note for note in notes) == idle


# ------------------------------------------------------------------ slope


def ratios() -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    return [0.3 * torch.randn(N, generator=source, dtype=torch.float64) for _ in range(2)]


def slopes(
    scale: float, method: Any = None, *, replaced: bool = False, with_ratios: bool = True
) -> list[str]:
    """The sentences of a run whose clients weigh by `scale` times the true log ratio."""
    least = torch.tensor(0.5, dtype=torch.float64)
    ones = torch.ones(N, dtype=torch.bool)
    a = [bounded(scale * r, ones, least, 10.0) for r in ratios()]
    ess = [float(effective_size(v)) for v in a]
    server = sizes([N, N], [N, N] if replaced else ess, ess)
    x, y = torch.zeros(N, 4), torch.zeros(N).long()
    clients = [client_data(x, y, i) for i in range(2)]
    states = {i: {"importance": {"a": torch.ones(N) if replaced else a[i]}} for i in range(2)}
    last = after(server, states)
    texts = importance_sentences(
        method or disk(), last, TRAINING, clients, ratios() if with_ratios else None
    )
    return [text for text in texts if "slope" in text]


def test_where_the_truth_is_known_the_slope_is_reported() -> None:
    """Of weights under the same bounds: those of the true ratio have exactly 1."""
    assert slopes(1.0) == [
        "Estimated log weights follow the true ones with slope 1.00 and correlation 1.00."
    ]
    (little,) = slopes(0.1)
    assert "with slope 0.10 and correlation 1.00: below 0.8 they do too little" in little
    assert "More density_rounds or more examples are what is left" in little
    assert "take feddisk" in slopes(0.1, disk(temper=0.5))[0]
    assert "estimator" not in slopes(0.1, disk(temper=0.5))[0]
    (much,) = slopes(1.4)
    assert "above 1.2 they do too much" in much


def test_advice_names_only_what_a_run_does_not_have() -> None:
    """Two values, real numbers and images, each with the density that "auto" is there and not."""
    real, binary = torch.randn(9, 4), (torch.randn(9, 4) > 0).float() - 1.0
    auto = 'density="auto"'

    def missing(x: Tensor, pair: Any = None, **options: Any) -> list[str]:
        setting = replace(SETTING, shape=tuple(x.shape[1:]), two_values=pair)
        method = recipes.feddisk(setting, hidden=(4,), **options)
        return differing(method, [client_data(x, torch.zeros(9).long(), 0)])

    image = torch.randn(9, 1, 2, 2)
    for x, pair in ((real, None), (binary, (-1.0, 0.0)), (image, None)):
        assert missing(x, pair) == []
        other = "mixture" if x is not real else "bernoulli"
        assert missing(x, pair, density=other) == [auto]
    assert missing(binary, (-1.0, 0.0), density="bernoulli") == [auto]  # of another range
    assert missing(real, temper=0.5, estimator="classifier") == ['estimator="direct"', "temper=1"]


def test_no_slope_is_reported_of_controls_unknown_ratios_and_weights_of_1() -> None:
    assert slopes(1.0, with_ratios=False) == []
    for estimator in ("true", "equal"):
        assert slopes(0.1, disk(estimator=estimator)) == []
    assert slopes(3.0, replaced=True) == []
    wrapped = replace(disk(), inner=disk())
    assert slopes(0.1, wrapped) == slopes(0.1)


@pytest.mark.slow
def test_runs_in_a_world_say_it() -> None:
    """The direct ratio follows the truth, at temper 0.02 not; one of three weighs in one round."""

    def why(cohort: int | None = None, **options: Any) -> list[str]:
        training: dict[str, Any] = {"rounds": 23, "steps": 1, "batch": 50}
        config = {
            "data": {"name": "binary-world", "validation": 0.0},
            "shift": {"kind": "natural", "clients": 3},
            "model": {"name": "linear"},
            "method": {"name": "feddisk", "hidden": [50], **options},
            "training": training if cohort is None else training | {"cohort": cohort},
        }
        return list(summary(run_experiment(validate(config))).why)

    assert any("slope" in text and "they do" not in text for text in why())
    assert any("slope 0.02" in text and "they do too little" in text for text in why(temper=0.02))
    assert any("weighing_rounds = 11 and training.rounds = 33" in text for text in why(cohort=1))
