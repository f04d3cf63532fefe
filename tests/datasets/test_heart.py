"""The four hospitals: reading, scaling, refusals, and the real files."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift import datasets
from fedshift.datasets import catalogue
from fedshift.datasets.sites import Sites, pooled, split_sites
from fedshift.errors import DataError, InputError
from fedshift_papers.datasets import heart
from support.dataset_fixtures import refuses
from support.site_fixtures import HEART_ROW, write_heart


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_heart(tmp_path / "heart-disease")


@pytest.fixture(scope="module")
def real() -> Path:
    """The official files."""
    try:
        return datasets.find("heart-disease")
    except DataError:
        pytest.skip("heart-disease is not in $FEDSHIFT_DATA (`fedshift datasets fetch` gets it)")


def made(seed: int = 0, sizes: tuple[int, ...] = (40, 30, 21, 10)) -> heart.Patients:
    """Patients with Gaussian values, a fifth missing; hospital i has means of its own."""
    rng = np.random.default_rng(seed)
    site = np.repeat(np.arange(len(sizes)), sizes)
    values = rng.normal(5.0 + 3.0 * site[:, None], 2.0, (len(site), 13))
    values[rng.random(values.shape) < 0.2] = np.nan
    return heart.Patients(Path("made"), values, rng.integers(0, 2, len(site)), site)


# ---------------------------------------------------------------------------------------- reading


def test_files_give_features_labels_and_hospitals(folder: Path) -> None:
    table = heart.scan(folder)
    assert table.site.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert table.y.tolist() == [0, 0, 1, 0, 1, 1, 1, 0, 1]
    assert table.values[0].tolist() == [63, 1, 1, 145, 233, 1, 2, 150, 0, 2.3, 3, 0, 6]
    names = [column.name for column in heart.FEATURES]
    missing = [{names[f] for f in np.flatnonzero(np.isnan(row))} for row in table.values]
    rest = {"slope", "ca", "thal"}
    # ?, -9, and 0 where nobody can have 0: row 7's pressure, the cholesterol of rows 5 and 6.
    assert missing[:3] == [set(), set(), {"thal"}]
    assert missing[3:5] == [rest, rest | {"chol"}]
    assert missing[5] == missing[6] == {"chol", "fbs", "ca", "thal"}
    assert missing[7:] == [{"trestbps", "ca", "thal"}, {"ca"}]


CASES = {
    "line 2 has 13 values, expected 14: age, sex, cp,": lambda row: row.rpartition(",")[0],
    "line 2 has 1 values, expected 14": lambda row: row.replace(",", ";"),
    'line 2: age is "630"; allowed: 0 to 120 years, or ?': lambda r: r.replace("63.0", "630"),
    'line 2: age is "sixty"; allowed: 0 to 120 years': lambda row: row.replace("63.0", "sixty"),
    'line 2: age is "nan"; allowed': lambda row: row.replace("63.0", "nan"),
    'line 2: age is "6_3"; allowed': lambda row: row.replace("63.0", "6_3"),
    'line 2: age is ""; allowed': lambda row: row.replace("63.0", ""),
    'line 2: oldpeak is "-23"; allowed: -8 to 12, or ?': lambda row: row.replace("2.3,", "-23,"),
    'line 2: thal is "5"; allowed: 3, 6, 7, or ? where it is missing': lambda row: row.replace(
        ",6.0,", ",5,"
    ),
    'line 2: num is "?"; allowed: 0, 1, 2, 3, 4. Replace': lambda row: row[:-1] + "?",
    'line 2: num is "5"; allowed: 0, 1, 2, 3, 4. Replace': lambda row: row[:-1] + "5",
}


@pytest.mark.parametrize("message", CASES)
def test_damaged_lines_are_named(folder: Path, message: str) -> None:
    broken = folder / "processed.hungarian.data"
    broken.write_text(f"{HEART_ROW}\n{CASES[message](HEART_ROW)}\n")
    with refuses(broken, message):
        heart.scan(folder)


def test_the_row_that_the_cases_change_is_a_good_one(folder: Path) -> None:
    (folder / "processed.hungarian.data").write_text(f"\n{HEART_ROW}\r\n\n {HEART_ROW} \n")
    assert (heart.scan(folder).site == 1).sum() == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "has no rows"), (b"\n \n", "has no rows"), (b"63,\xff", "not a text file"),
     (b"age,sex\n", "line 1 has 2 values"), (None, "cannot be read (No such file")],
)  # fmt: skip
def test_files_that_are_no_tables_are_named(
    folder: Path, content: bytes | None, message: str
) -> None:
    broken = folder / "processed.va.data"
    broken.unlink() if content is None else broken.write_bytes(content)
    with refuses(broken, message):
        heart.scan(folder)


def test_other_counts_than_the_official_ones_are_refused(folder: Path) -> None:
    place = folder / "processed.cleveland.data"
    counts = "3 rows, 1 with num > 0, 1 values missing; officially 303 rows, 139 with num > 0, 6 "
    with refuses(place, counts):
        heart.read(folder)


# ---------------------------------------------------------------------------------------- scaling


def test_sums_add_up_and_give_mean_and_deviation_of_the_values_present() -> None:
    table = made()
    apart = [heart.sums(table.values[table.site == i]) for i in range(4)]
    together = sum(apart[1:], apart[0])
    x = heart.standardise(table.values, together).numpy()
    mean, sd = np.nanmean(table.values, 0), np.nanstd(table.values, 0)
    missing = np.isnan(table.values)
    assert np.allclose(x[~missing], ((table.values - mean) / sd)[~missing], atol=1e-6)
    assert (x[missing] == 0).all()
    assert missing.any(0).all()
    alone = heart.standardise(table.values, apart[0]).numpy()
    assert not np.allclose(x, alone, atol=0.1)


def test_the_scale_is_that_of_the_training_rows_alone() -> None:
    table = made()
    before, split = heart.federated(table, seed=3)
    values = table.values.copy()
    values[np.concatenate(split.test)] *= 7.0
    rows = np.concatenate(split.train)
    again, same = heart.federated(dataclasses.replace(table, values=values), seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(split.train, same.train, strict=True))
    assert torch.equal(again.x[rows], before.x[rows])
    values[split.train[2][0]] += 1.0
    moved, _ = heart.federated(dataclasses.replace(table, values=values), seed=3)
    assert not torch.equal(moved.x[rows[1:]], before.x[rows[1:]])


def test_equal_patients_look_alike_in_every_hospital() -> None:
    """The input must not reveal the hospital to the router: scaling per hospital would."""
    table = made()
    twins = [int(np.flatnonzero(table.site == i)[0]) for i in range(4)]
    table.values[twins] = table.values[twins[0]]
    x, _ = heart.federated(table)
    assert all(torch.equal(x.x[twins[0]], x.x[t]) for t in twins)
    each = [heart.sums(table.values[table.site == i]) for i in range(4)]
    alone = [heart.standardise(table.values[[t]], s) for t, s in zip(twins, each, strict=True)]
    assert not torch.equal(alone[0], alone[1])


def test_constant_and_absent_features_are_zero() -> None:
    values = np.tile(np.arange(13.0) + 0.1, (6, 1))
    values[:, 4] = np.nan
    x = heart.standardise(values, heart.sums(values))
    assert x.abs().max() < 1e-12
    values[0] += 1e-3
    assert (heart.standardise(values, heart.sums(values)).abs().max(0).values > 2).sum() == 12


# --------------------------------------------------------------------------------- dividing sites


def test_every_site_keeps_the_same_share_for_testing() -> None:
    table = made()
    everyone, split = heart.federated(table, seed=1)
    assert [len(rows) for rows in split.train] == [28, 21, 14, 7]
    assert [len(rows) for rows in split.test] == [12, 9, 7, 3]
    for i in range(4):
        both = np.concatenate([split.train[i], split.test[i]])
        assert np.array_equal(np.sort(both), np.flatnonzero(table.site == i))
    train, test = pooled(everyone, split)
    assert (len(train), len(test)) == (70, 31)
    assert torch.equal(test.x[12:21], everyone.x[split.test[1]])
    assert torch.equal(train.y[:28], everyone.y[split.train[0]])


def test_the_division_is_drawn_by_seed_and_site() -> None:
    site = np.repeat([0, 1], [90, 30])
    first = split_sites(site, 2, seed=0)
    assert [len(rows) for rows in first.train] == [63, 21]
    smaller = split_sites(site[30:], 2, seed=0)
    assert np.array_equal(first.test[1] - 30, smaller.test[1])
    assert not np.array_equal(first.test[1], split_sites(site, 2, seed=1).test[1])


@pytest.mark.parametrize(("n", "test"), [(1, 0.3), (0, 0.3), (10, 0.0), (10, 1.0), (3, 0.7)])
def test_a_site_without_training_or_test_rows_is_refused(n: int, test: float) -> None:
    with pytest.raises(
        InputError, match=rf"client 0 has {n} examples: a test share of {test} leaves"
    ):
        split_sites(np.repeat([0, 1], [n, 500]), 2, 0, test)


def test_sites_that_do_not_fit_are_refused() -> None:
    x, y, site = torch.zeros(3, 2), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2])
    good = Sites(x, y, site, ("a", "b", "c"), ("no", "yes"))
    with pytest.raises(InputError, match="site goes from 0 to 2, but there are 2 names: a, b"):
        dataclasses.replace(good, sites=("a", "b"))
    with pytest.raises(InputError, match="y goes from 0 to 1, but there are 1 names: no"):
        dataclasses.replace(good, classes=("no",))
    with pytest.raises(InputError, match=r"site is torch.int64 with shape \[2\]; it must be int64"):
        dataclasses.replace(good, site=site[:2])
    with pytest.raises(InputError, match="one label for each"):
        dataclasses.replace(good, y=y[:2])


# ------------------------------------------------------------------------------------- real files


def test_the_catalogue_knows_it(folder: Path, tmp_path: Path) -> None:
    assert datasets.find("heart-disease", [tmp_path]) == folder
    (folder / "processed.va.data").unlink()
    with pytest.raises(
        DataError, match=r"incomplete: it lacks processed.va.data. Get it: fedshift"
    ):
        datasets.load("heart-disease", [tmp_path])
    remotes = catalogue.entry("heart-disease").remotes
    assert tuple(remote.name for remote in remotes) == heart.FILES


def test_the_real_files_are_the_published_ones(real: Path) -> None:
    for remote in catalogue.entry("heart-disease").remotes:
        raw = (real / remote.name).read_bytes()
        assert (len(raw), hashlib.md5(raw).hexdigest()) == (remote.size, remote.md5)


def test_the_real_counts_are_those_that_are_documented(real: Path) -> None:
    table = heart.scan(real)
    heart.check_complete(table)
    counts = [np.bincount(table.y[table.site == i]).tolist() for i in range(4)]
    assert counts == [[164, 139], [188, 106], [8, 115], [51, 149]]
    marked = [(real / name).read_text().count("?") for name in heart.FILES]
    assert marked == [6, 782, 273, 698]
    # The zeros: every Swiss cholesterol; 49 cholesterols and one pressure of Long Beach.
    extra = [int(np.isnan(table.values[table.site == i]).sum()) - m for i, m in enumerate(marked)]
    assert extra == [0, 0, 123, 50]
    # FLamby drops slope, ca and thal, and then every row with a ?: 740 are left by its README.
    rows = [[r.split(",") for r in (real / n).read_text().splitlines()] for n in heart.FILES]
    complete = [sum("?" not in row[:10] for row in one) for one in rows]
    assert complete == [303, 261, 46, 130]
    assert sum(complete) == 740


def test_the_real_federation_can_be_learnt_and_its_hospitals_distinguished(real: Path) -> None:
    table = heart.scan(real)
    everyone, split = heart.federated(table)
    assert [len(rows) for rows in split.train] == [212, 205, 86, 140]
    train, test = pooled(everyone, split)
    loaded = heart.read(real)
    assert torch.equal(loaded[1].x, test.x)
    assert tuple(map(len, loaded)) == catalogue.entry("heart-disease").examples
    # Over 10 divisions ridge is right on 82 % of the patients (deviation 2), of whom 55 % are ill,
    # and on 61 % of the hospitals (3), of which the largest has a third of the patients.
    assert ridge(train.x, train.y, test.x, 2).eq(test.y).double().mean() > 0.75
    home = [
        torch.from_numpy(table.site[np.concatenate(rows)]) for rows in (split.train, split.test)
    ]
    assert ridge(train.x, home[0], test.x, 4).eq(home[1]).double().mean() > 0.5


def ridge(x: torch.Tensor, y: torch.Tensor, query: torch.Tensor, classes: int) -> torch.Tensor:
    """Labels by least squares on indicators."""
    a, b = (torch.cat([v, torch.ones(len(v), 1)], 1).double() for v in (x, query))
    hot = torch.nn.functional.one_hot(y, classes).double()
    return (b @ torch.linalg.solve(a.T @ a + torch.eye(14, dtype=a.dtype), a.T @ hot)).argmax(1)
