"""Claims about labels: what a cap guarantees, and what gradients reveal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedshift.audit import audit_marginals
from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.errors import DataError, InputError
from fedshift.experiments.claims import audit_task, claimed
from fedshift.experiments.task.preparing import prepare
from fedshift.seeds import numpy_generator
from fedshift.server.pals import pals_weights
from support.small_runs import config_of
from support.toy_claims import CLASSES, federation, lie


def adversarial(source: np.random.Generator) -> np.ndarray:
    """Honest counts [M, K], with an adversarial claim of any size and shape in row 0."""
    clients = int(source.integers(4, 9))
    counts = source.integers(1, 200, (clients, CLASSES)).astype(float)
    size = 10.0 ** source.uniform(0, 12)
    row = source.dirichlet(np.full(CLASSES, 10.0 ** source.uniform(-2, 1)))
    if source.random() < 0.5:
        row = target_of(source, CLASSES)
    counts[0] = np.maximum(np.round(size * row), 0)
    counts[0, int(row.argmax())] += 1
    return counts


def target_of(source: np.random.Generator, classes: int) -> np.ndarray:
    target = source.dirichlet(np.full(classes, 0.5))
    return target / target.sum()


def largest_over_cap(claims: int, seed: int) -> float:
    """The largest weight less its cap over so many claims, lambda and ESS settings in turn."""
    source, worst = numpy_generator(seed, "claims"), -1.0
    for k in range(claims):
        counts, target = adversarial(source), target_of(source, CLASSES)
        if k % 3 == 0:  # the liar claims exactly T
            counts[0] = np.round(1e9 * target)
        cap = float(source.uniform(1.0 / len(counts), 1.0))
        given = {"ess": 0.05} if k % 4 == 0 else {"lam": float(source.choice([0.0, 1.0, 50.0]))}
        try:
            weights = pals_weights(counts, target, cap=cap, **given).weights
        except InputError:  # a cap and an ESS that do not go together
            continue
        worst = max(worst, float(weights.max()) - cap)
    return worst


@pytest.mark.slow
def test_no_claim_buys_more_than_the_cap() -> None:
    """Sizes and shapes are drawn for each claim; more than some hundred show nothing new."""
    assert largest_over_cap(500, seed=1) <= 1e-9


def test_without_a_cap_a_claim_wins() -> None:
    source = numpy_generator(0, "claims")
    counts, target = adversarial(source), target_of(source, CLASSES)
    counts[0] = np.round(1e9 * target)
    assert pals_weights(counts, target, lam=1.0).weights[0] > 0.95


def alarms(n: int, distance: float, draws: int, offset: float = 0.0) -> tuple[float, float]:
    """(share of draws in which client 0 is detected, share of honest clients that are accused)."""
    detected, false = 0, 0
    for seed in range(draws):
        source = numpy_generator(seed, "toy", n)
        first, second, counts = federation(n, source, offset)
        verdicts = audit_marginals(first, second, lie(counts, distance, source))
        detected += verdicts[0].verdict == "inconsistent"
        false += sum(one.verdict == "inconsistent" for one in verdicts[1:])
    return detected / draws, false / (draws * (len(verdicts) - 1))


@pytest.mark.slow
def test_power_on_the_toy_table() -> None:
    """Spec: at least 0.9 for a lie of 0.1 with 500 examples, at 1 % false alarms."""
    power, false = alarms(500, 0.1, 30)
    assert power >= 0.9
    assert false <= 0.03
    silent, false = alarms(500, 0.0, 30)
    assert silent <= 0.1
    assert false <= 0.03


@pytest.mark.slow
def test_the_whole_toy_table() -> None:
    """Alarms at 1 %: the honest at most 1.5 %; lies and offsets are found the more, the larger."""
    lies = [alarms(500, distance, 200)[0] for distance in (0.05, 0.1, 0.2)]
    offsets = [alarms(500, 0.0, 100, offset)[0] for offset in (0.25, 0.5, 1.0)]
    assert lies == sorted(lies)
    assert lies[1] >= 0.9
    assert offsets == sorted(offsets)
    assert offsets[-1] >= 0.9
    silent, false = alarms(500, 0.0, 200)
    assert silent <= 0.03
    assert false <= 0.015


def test_labels_of_one_client_alone_are_not_tested() -> None:
    first, second, counts = federation(100, numpy_generator(0, "toy"))
    counts[:, 4] = 0
    counts[3] = [0, 0, 0, 0, 100]
    verdicts = audit_marginals(first, second, counts)
    assert verdicts[3].verdict == "untested"
    assert np.isnan(verdicts[3].p)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a, b, c: (a, b[:, 1:], c), "they must be"),
        (lambda a, b, c: (a[:2], b[:2], c[:2]), "2 clients"),
        (lambda a, b, c: (a * np.nan, b, c), "gradients must be finite"),
        (lambda a, b, c: (a, b, c * 0), "no client may be empty"),
    ],
)
def test_impossible_tables_are_refused(spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        audit_marginals(*spoil(*federation(20, numpy_generator(0, "toy"))))


def test_a_configured_task() -> None:
    """One client of sixteen claims that examples of one label have another."""
    config = config_of(
        "fedavg", shift={"kind": "dirichlet-per-client", "beta": 1.0, "clients": 16, "min_size": 20}
    )
    prepared = prepare(config)
    params, buffers = prepared.model.init()
    assert {one.verdict for one in audit_task(prepared, params, buffers)} <= {
        "consistent", "untested"
    }  # fmt: skip
    counts = prepared.federation().table["labels"].numpy().copy()
    counts[2] = np.roll(counts[2], 3)
    verdicts = audit_task(prepared, params, buffers, counts)
    assert verdicts[2].verdict == "inconsistent"
    counts[5] = 0.0
    counts[5, 9] = 1e9  # a size that would pass for noise, and hide the other
    verdicts = audit_task(prepared, params, buffers, counts)
    assert (verdicts[2].verdict, verdicts[5].verdict) == ("inconsistent", "inconsistent")


def test_claims_by_label_and_client(tmp_path: Path) -> None:
    """Rows are matched by label and client: by position, another order would accuse all clients."""
    path = tmp_path / "claims.csv"
    path.write_text("client,owl,cat,dog\n1,6,4,5\n0,3,1,2\n")
    assert claimed(path, ("cat", "dog", "owl")).tolist() == [[1, 2, 3], [4, 5, 6]]
    path.write_text("client,dog,cat\nours,2,1\n0,5,4\n")
    assert claimed(path, ("cat", "dog")).tolist() == [[1, 2], [4, 5]]
    path.write_text("cat,dgo\n1,2\n")
    with pytest.raises(DataError, match='claims.csv: label "dgo" is not in both.* cat, dog, in'):
        claimed(path, ("cat", "dog"))
    path.write_text("cat\n1\n")
    with pytest.raises(DataError, match='label "dog" is not in both'):
        claimed(path, ("cat", "dog"))


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.toml").write_text(
        '[shift]\nkind = "dirichlet-per-client"\nbeta = 1.0\nclients = 4\n'
        '[model]\nname = "linear"\n'
    )
    assert perform(app, ["audit", "marginals", "f.toml", "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [one["client"] for one in answer["clients"]] == [0, 1, 2, 3]
    assert perform(app, ["audit", "marginals", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert perform(app, ["audit", "marginals", "f.toml", "--level", "2"]) == 2
    assert "--level 2: allowed: more than 0, less than 0.5" in capsys.readouterr().err
