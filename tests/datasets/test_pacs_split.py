"""The authors' three clients of PACS, and the task on the real images where they are found."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift import datasets, pals_weights, shifts
from fedshift.data import Examples
from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.config.schema import Config
from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.task.preparing import oracle_clients, prepare
from fedshift.seeds import numpy_generator
from fedshift_papers.datasets import pacs
from fedshift_papers.datasets.fedpals_clients import PACS_ABSENT, Imbalanced, pacs_roles

SPLIT_SIZES = {"train": 5683, "val": 2048, "test": 1670, "id_val": 284, "id_test": 306}
CLIENT_SIZES = [190, 1865, 1909]
LAMBDAS = (0.0, 12.0, 42.0, 93.0)


@pytest.fixture(scope="module")
def real() -> pacs.Pacs:
    try:
        return pacs.scan(datasets.find("pacs"))
    except DataError as error:
        pytest.skip(f"needs PACS: {error}")


# ------------------------------------------------------------------------------ the authors' split


def labels_of(n: int = 400) -> np.ndarray:
    return np.arange(n) % 7


def test_imbalanced_clients_lack_one_label_each_and_keep_the_rest() -> None:
    labels = labels_of()
    parts = Imbalanced()(labels, 7, 3, numpy_generator(0, "t"))
    shifts.check_partition(parts, len(labels), 3)
    counts = shifts.label_counts(labels, parts, 7)
    assert (counts == 0).tolist() == [
        [False, False, True, False, False, False, False],
        [False, True, False, False, False, False, False],
        [True, False, False, False, False, False, False],
    ]
    # 58 samples of labels 0 and 57 of every other; 228 of labels 3 to 6.
    one, two = int(0.33 * 228), int(0.66 * 228)
    assert len(parts[0]) == int(0.1 * (one + 29 + 28))
    assert len(parts[1]) == two - one + 29 + 28
    assert len(parts[2]) == 228 - two + 29 + 29
    assert counts[1, 0] == 29
    assert counts[2, 1] == 57 - 28


def test_only_the_reduction_depends_on_the_seed() -> None:
    labels = labels_of()
    a, b = (Imbalanced()(labels, 7, 3, numpy_generator(s, "t")) for s in (0, 1))
    assert not np.array_equal(a[0], b[0])
    for k in (1, 2):
        assert np.array_equal(a[k], b[k])
    whole = Imbalanced(reduced=1.0)(labels, 7, 3, numpy_generator(0, "t"))
    assert np.isin(a[0], whole[0]).all()
    assert np.isin(b[0], whole[0]).all()
    assert sum(map(len, whole)) == len(labels)
    rest = np.random.default_rng(1).permutation(np.flatnonzero(labels > 2))
    wanted = np.concatenate([rest[: int(0.33 * len(rest))], *(np.flatnonzero(labels == y)[:k]
                             for y, k in ((0, 29), (1, 28)))])  # fmt: skip
    assert np.array_equal(whole[0], np.sort(wanted))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Imbalanced((0, 0, 1)), "three different labels"),
        (lambda: Imbalanced(reduced=0.0), "0 < reduced <= 1"),
        (lambda: Imbalanced()(labels_of(), 7, 4, numpy_generator(0)), "has exactly 3"),
        (
            lambda: Imbalanced((0, 1, 7))(labels_of(), 7, 3, numpy_generator(0)),
            r"allowed: labels 0\.\.6",
        ),
    ],
)
def test_imbalanced_refuses(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_roles_leave_giraffes_out_of_the_target(tree: Path) -> None:
    dataset = pacs.scan(tree)
    roles = pacs_roles(dataset, seed=0)
    assert roles.target.sum() == pytest.approx(1)
    assert roles.target[PACS_ABSENT] == 0
    assert np.array_equal(roles.target > 0, np.arange(7) != PACS_ABSENT)
    for rows, split in ((roles.test, "test"), (roles.validation, "id_val")):
        assert np.isin(rows, dataset.rows(split)).all()
        assert (dataset.y[rows] != PACS_ABSENT).all()
    for rows in roles.clients:
        assert np.isin(rows, dataset.rows("train")).all()


# ------------------------------------------------------------------------------- the real data set


@pytest.mark.slow
def test_real_sizes_are_the_benchmarks(real: pacs.Pacs) -> None:
    pacs.check_complete(real)
    assert {name: len(real.rows(name)) for name in pacs.SPLITS} == SPLIT_SIZES
    train = real.domain[real.rows("train")]
    assert (train == pacs.DOMAINS.index("cartoon")).sum() == 2126
    assert (train == pacs.DOMAINS.index("sketch")).sum() == 3557
    roles = pacs_roles(real, seed=0)
    assert [len(rows) for rows in roles.clients] == CLIENT_SIZES
    assert len(roles.test) == 1488


def ess_percent(real: pacs.Pacs, seed: int, as_coded: bool = False) -> list[list[float]]:
    """100 ESS / N along the paper's lambdas, for both forms of the objective."""
    roles = pacs_roles(real, seed)
    counts = shifts.label_counts(real.y, roles.clients, 7)
    if as_coded:
        train = real.rows("train")
        places = [np.searchsorted(train, rows) for rows in roles.clients]
        taken = [np.where(real.y[train[p]] <= PACS_ABSENT, p, train[p]) for p in places]
        counts = np.array([np.bincount(real.y[rows], minlength=7) for rows in taken])
    return [
        [
            100 * pals_weights(counts, roles.target, lam=lam, fidelity=form).ess_fraction
            for lam in LAMBDAS
        ]
        for form in ("norm", "squared")
    ]


@pytest.mark.slow
def test_real_lambdas_give_the_papers_ess_with_the_norm_and_not_with_its_square(
    real: pacs.Pacs,
) -> None:
    """The paper prints 15, 25, 50 and 75 %; five reductions of the small client once measured gave
    14.6, 23.8, 46.9, 72.4 with a scatter of 1.5, 2.2, 3.0, 2.3. Reductions scatter by 3 to 7 points
    here, so that only the mean over many of them is held against those bands."""
    table = np.array([ess_percent(real, seed) for seed in range(100)])
    norm, squared = table.mean(0)
    measured, scatter = np.array([14.6, 23.8, 46.9, 72.4]), np.array([1.5, 2.2, 3.0, 2.3])
    assert (np.abs(norm - measured) <= scatter).all(), norm
    assert (np.abs(norm - [15, 25, 50, 75]) < 5).all(), norm
    # At lambda = 0 the two are one problem.
    assert squared[0] == pytest.approx(norm[0], rel=1e-9)
    assert (np.abs(squared - measured)[1:] > 2 * scatter[1:]).all(), squared


@pytest.mark.slow
def test_real_images_that_the_authors_code_takes_do_not_lack_the_labels(real: pacs.Pacs) -> None:
    """Places among the training images, taken for rows of the whole table: see Imbalanced."""
    as_meant = np.array([ess_percent(real, seed)[0] for seed in range(20)]).mean(0)
    as_coded = np.array([ess_percent(real, seed, as_coded=True)[0] for seed in range(20)]).mean(0)
    assert (as_coded > as_meant + 4).all()
    roles, train = pacs_roles(real, 0), real.rows("train")
    place = np.searchsorted(train, roles.clients[1])
    taken = np.where(real.y[train[place]] <= PACS_ABSENT, place, train[place])
    assert np.bincount(real.y[taken], minlength=7)[1] > 300
    assert np.bincount(real.y[roles.clients[1]], minlength=7)[1] == 0


@pytest.mark.slow
def test_the_real_oracle_shrinks_to_the_supply(real: pacs.Pacs) -> None:
    """Houses are scarcest: with the derived split, 333 of them for 18.8 % of each client."""
    config = validate(
        {
            "data": {"name": "pacs", "validation": 0.0},
            "shift": {"kind": "natural", "clients": 3},
            "model": {"name": "linear"},
        }
    )
    clients = oracle_clients(prepare(config))
    if real.origin == "derived":
        assert [len(client.y) for client in clients] == [190, 1767, 1767]
    for client in clients:
        assert len({x.numpy().tobytes() for x in client.x}) >= len(client.x) - 1
        assert int((client.y == PACS_ABSENT).sum()) == 0


@pytest.mark.slow
def test_real_images_decode_and_load_by_name(real: pacs.Pacs) -> None:
    data = datasets.load("pacs")
    assert data.train.x.shape == (5683, 3, 96, 96)
    assert data.test.x.shape == (1670, 3, 96, 96)
    assert data.train.y.bincount().tolist() == np.bincount(real.y[real.rows("train")]).tolist()
    rest = real.samples(real.rows("val", "id_val", "id_test"))
    for x in (data.train.x, data.test.x, rest.x):
        # No image is of a single colour, which a failed decoding would give.
        assert (x.flatten(1).amax(1) > x.flatten(1).amin(1)).all()


@pytest.mark.slow
def test_a_real_run_with_a_resnet(real: pacs.Pacs, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole path on 96-pixel images: three clients, FedPALS, two rounds of three steps.

    Every eighth image of the test is scored: all of them take longer than training.
    """
    config = Config.model_validate(
        {
            "data": {"name": "pacs", "validation": 0.0},
            "shift": {"kind": "natural", "clients": 3},
            "model": {"name": "resnet18-gn"},
            "method": {"name": "fedpals", "lam": 12.0, "fidelity": "norm"},
            "training": {"rounds": 2, "steps": 3, "batch": 8, "lr": 0.01, "evaluate_every": 2},
        }
    )
    seconds: list[float] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            seconds.append(event["seconds"])

    began = time.perf_counter()
    prepared = prepare(config)
    task = prepared.task
    assert [len(c.y) for c in task.clients] == CLIENT_SIZES
    assert len(task.test) == 1488
    some = Examples(task.test.x[::8], task.test.y[::8])
    fewer = replace(prepared, task=replace(task, test=some))
    done = run_experiment(config, prepared=fewer, listen=listen)
    with capsys.disabled():
        per_step = sum(seconds) / (2 * 3 * 3)
        whole = time.perf_counter() - began
        print(f"\nPACS 96 px, ResNet-18: {per_step:.2f} s a step of 8 images, {whole:.0f} s in all")
    assert done.outcome.metrics[-1].round == 2
    assert np.isfinite(done.outcome.metrics[-1].train_loss)
    weights = pals_weights(task.table()["labels"].numpy(), task.target, lam=12.0, fidelity="norm")
    assert done.outcome.weights == pytest.approx(weights.weights, abs=1e-9)
