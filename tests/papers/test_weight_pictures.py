"""Pictures from label counts: FedPALS' Figures 1 and 4."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial import ConvexHull

from fedshift import pals_weights
from fedshift.experiments.config.load import validate
from fedshift.experiments.task.preparing import prepare
from fedshift_papers.pictures.federations import cameras, federation_of, three_labels
from fedshift_papers.pictures.simplex import hull, place
from fedshift_papers.pictures.weights import in_simplex, weighed, weights_chart
from fedshift_papers.protocols.study import missing_data
from fedshift_papers.reproduce.catalogue import study
from support.command_line import calling
from support.image_fixtures import count_as_whole, write_wildcam

COUNTS = "client,a,b,c\nx,50,50,0\ny,30,0,70\nz,0,900,100\ntarget,1,2,3\n"
Call = Callable[..., tuple[int, str, str]]


call = calling("reproduce")


def test_marginals_stand_at_their_barycentric_coordinates() -> None:
    """A mixture stands where the corners' mixture is, and no corner where another one is."""
    corners = np.array([place(row) for row in np.eye(3)])
    sides = np.linalg.norm(corners - np.roll(corners, 1, axis=0), axis=1)
    assert sides == pytest.approx([sides[0]] * 3)
    rng = np.random.default_rng(0)
    for marginal in rng.dirichlet(np.ones(3), 20):
        assert place(marginal) == pytest.approx(marginal @ corners)


def test_the_hull_is_scipys() -> None:
    rng = np.random.default_rng(0)
    for n in (3, 5, 40):
        points = rng.random((n, 2))
        corners = hull([(x, y) for x, y in points.tolist()])
        assert set(corners) == {tuple(p) for p in points[ConvexHull(points).vertices].tolist()}
    assert hull([(0.0, 0.0), (1.0, 1.0), (0.5, 0.5)]) == [(0.0, 0.0), (1.0, 1.0)]
    assert hull([(0.0, 0.0), (0.0, 0.0)]) == [(0.0, 0.0)]


def test_a_file_of_counts_has_a_row_of_the_target(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text(COUNTS)
    federation = federation_of(path)
    assert federation.clients == ("x", "y", "z")
    assert federation.target == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert federation.counts.tolist() == [[50, 50, 0], [30, 0, 70], [0, 900, 100]]


def notes(drawn: str) -> list[str]:
    return re.findall(r"<title>([^<]*)</title></(?:circle|polygon)>", drawn)


@pytest.mark.slow
def test_figure_1_shows_clients_target_and_mixtures(tmp_path: Path) -> None:
    """Any three labels: the marks are the marginals, and what FedPALS mixes at its ESS."""
    path = tmp_path / "counts.csv"
    path.write_text(COUNTS.replace("z,", "empty,0,0,0\nz,"))
    federation = federation_of(path)
    marks = notes(in_simplex(federation).panels["simplex.svg"].drawing)
    assert marks[:3] == [
        "x, n = 100: 0.500, 0.500, 0.000", "y, n = 100: 0.300, 0.000, 0.700",
        "z, n = 1000: 0.000, 0.900, 0.100",
    ]  # fmt: skip
    assert marks[3] == "FedAvg: 0.067, 0.792, 0.142"
    assert marks[-1] == "target: 0.167, 0.333, 0.500"
    shares = federation.counts / np.maximum(federation.counts.sum(1), 1)[:, None]
    for mark, one in zip(marks[4:-1], weighed(federation), strict=True):
        mixture = one.solved.weights @ shares
        assert mark == f"FedPALS, {one.label}: " + ", ".join(f"{v:.3f}" for v in mixture)
    first = weighed(federation)[0].solved
    assert np.linalg.norm(first.residual) == pytest.approx(first.distance)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,c\n1,2,3\n", 'no row is named "target"; add one with the target'),
        ("client,a,b,c\ntarget,1,2,3\n", "no clients beside the target; add a row for each"),
        ("client,a,b,c\nx,1,2,3\ntarget,0,0,0\n", "the target has no examples; give counts or"),
        ("client,a,b\nx,1,2\ntarget,1,1\n", "shows three labels, the counts have 2; draw fedpals/"),
        (
            "client,a,b,c,d\nx,1,2,3,4\ntarget,1,1,1,1\n",
            "shows three labels, the counts have 4; merge columns, or draw fedpals/fig4",
        ),
        ("x,1,2,3\ntarget,1,1,1\n", "counts.csv"),
        ("client,a,b,c\nx,1,50.5,1\ntarget,1,1,1\n", 'client "x" has 50.5 examples of a label'),
        ("client,a,b,c\nx,1,2,x\ntarget,1,1,1\n", "counts.csv, line 2"),
    ],
)
def test_counts_that_cannot_be_drawn_are_refused(text: str, message: str, call: Call) -> None:
    Path("counts.csv").write_text(text)
    code, out, err = call("fedpals/fig1", "--counts", "counts.csv")
    assert code in (2, 3)
    assert out == ""
    assert message in " ".join(err.split())
    assert [p.name for p in Path().iterdir()] == ["counts.csv"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fedpals/fig1", "--seeds", "0"],
         "--seeds: nothing is trained for fedpals/fig1; it takes --counts, --out and --publish"),
        (["fedpals/fig1", "--dataset", "iwildcam"], "--dataset: nothing is trained for fedpals/fi"),
        (["fedpals/fig4", "--rounds", "3"],
         "--rounds: nothing is trained for fedpals/fig4; it takes --dataset, --counts, --out and"),
        (["fedpals/fig4", "--dataset", "iwildcam", "--counts", "counts.csv"],
         "--dataset: --counts says whose label counts are drawn; leave out one"),
        (["fedpals/fig9", "--counts", "counts.csv"],
         "--counts is for fedpals/fig1 and fedpals/fig4, not for fedpals/fig9; leave it out"),
        (["feddrm/fig8", "--counts", "counts.csv"],
         "--counts is for fedpals/fig1 and fedpals/fig4, not for feddrm/fig8; leave it out"),
    ],
)  # fmt: skip
def test_options_of_other_targets_are_refused(args: list[str], message: str, call: Call) -> None:
    code, _, err = call(*args)
    assert code == 2
    assert message in err
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_picture_is_written_with_its_numbers(call: Call) -> None:
    """Twice the same bytes; the numbers are those of `pals_weights`."""
    Path("counts.csv").write_text(COUNTS)
    code, out, err = call("fedpals/fig1", "--counts", "counts.csv", "--out", "o", "--publish", "p")
    assert (code, err) == (0, "")
    assert "Page: o/fig1/index.html" in out
    drawing = Path("p/fig1/plots.svg").read_bytes()
    assert Path("o/fig1/simplex.svg").read_bytes() == drawing
    assert {p.name for p in Path("p/fig1").iterdir()} == {"plots.svg", "table.md"}
    page = Path("o/fig1/table.md").read_text()
    assert page.startswith("# fedpals/fig1: Clients, target and weights in the simplex")
    assert "`fedshift reproduce fedpals/fig1 --counts counts.csv`" in page
    assert "The counts are those of counts.csv." in page
    code, out, _ = call("fedpals/fig1", "--format", "json")
    document = json.loads(out)
    written = json.loads(Path("reproduced/fig1/results.json").read_text())
    assert document == written | {"page": "reproduced/fig1/index.html"}
    (table,) = document["tables"]
    first, *_, last = table["rows"]
    given = three_labels()
    solved = pals_weights(given.counts, given.target, lam=0.0)
    assert table["header"][3] == "||T - S'a||²"
    assert first[3] == pytest.approx(solved.distance**2)
    assert (first[0], first[1], last[0]) == ("lambda = 0", 0.0, "FedAvg")
    assert last[2] == pytest.approx(1.0)
    assert "The counts are ours" in Path("reproduced/fig1/table.md").read_text()


@pytest.mark.slow
def test_figure_4_has_a_line_per_ess_and_dots_of_fedavg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """Of an iWildCam of 102 cameras, by its tables alone: no image is decoded."""
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "data"))
    places = (*range(1, 101), 8, 9)
    write_wildcam(tmp_path / "data" / "iwildcam_v2.0", places, 3, (4, 4))
    count_as_whole(monkeypatch, places, 3)
    federation = cameras(100)
    chart = weights_chart(federation)
    sizes = np.sort(federation.counts.sum(1))[::-1]
    *lines, dots = chart.series
    assert (dots.name, dots.line) == ("FedAvg", False)
    assert dots.y == pytest.approx(sizes / sizes.sum())
    assert lines[0].name == "FedPALS, lambda = 0"
    for line in lines:
        assert line.line
        assert sum(v or 0.0 for v in line.y) == pytest.approx(1.0)
    ess = [one.solved.ess_fraction for one in weighed(federation)]
    assert ess == sorted(ess)
    assert len(ess) == len(lines)
    assert call("fedpals/fig4")[0] == 0
    assert "<svg" in Path("reproduced/fig4/iwildcam-weights.svg").read_text()


@pytest.mark.slow
def test_a_picture_without_its_data_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = call("fedpals/fig4")
    assert code == 3
    assert 'data set "iwildcam" was not found' in err
    Path("counts.csv").write_text(COUNTS)
    assert call("fedpals/fig4", "--counts", "counts.csv")[0] == 0


@pytest.mark.slow
@pytest.mark.skipif(missing_data("cifar-10") is not None, reason="CIFAR-10 is not here")
@pytest.mark.parametrize(("labels", "percent"), [(2, 91), (3, 96)])
def test_fig8a_says_how_near_lambda_1000_is_to_fedavg(labels: int, percent: int) -> None:
    """Means of cohorts of ten; on a tenth of the examples they would be higher."""
    data = {"data": {"name": "cifar-10"}, "model": {"name": "lenet"}, "seeds": {"run": 0}}
    shift = {"kind": "sparsity", "labels_per_client": labels, "clients": 99}
    prepared = prepare(validate(data | {"shift": shift}))
    counts = np.asarray(prepared.task.table()["labels"], dtype=np.float64)
    rng = np.random.default_rng(0)
    cohorts = [np.sort(rng.choice(99, 10, replace=False)) for _ in range(100)]
    solved = [pals_weights(counts[ids], prepared.announced, lam=1000.0) for ids in cohorts]
    assert 100 * np.mean([s.ess_fraction for s in solved]) == pytest.approx(percent, abs=1)
    (foot,) = (n for n in study("fedpals/fig8a").chosen if "lambda=1000" in n)
    assert re.search(rf"on CIFAR-10 the ESS is .*\b{percent} %.* at C = {labels}", foot)
