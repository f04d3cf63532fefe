"""Every table and figure of FedDRM and of the MADE/MOON report: it starts, finishes and is drawn.

`test_reproduce_labelsets.py` has those on label sets, `test_reproduce_feddrm.py` the hospitals, and
`test_paper_pictures.py` those that nothing is trained for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedshift_papers.reproduce.catalogue import studies, study
from fedshift_papers.reproduce.reproduce import Request, make_plan, reproduce
from support.made_up_images import write_images

FEDDRM = sorted(n for n in studies() if n.startswith("feddrm/"))
# `test_reproduce_participation.py` has the worlds, whose densities are known.
MADE = sorted(n for n in studies() if n.startswith("made/") and n != "made/participation")
TINY = ("training.steps=5", "training.batch=4")
SETS = {"feddrm/fig7": "retina", "feddrm/small": "fashion-mnist-mini"}
OWN_NETWORK = ("feddrm/fig6", "feddrm/small", "feddrm/lenet")


@pytest.fixture(scope="module", autouse=True)
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield write_images(tmp_path_factory.mktemp("images"), patch)


def drawn(name: str, request: Request) -> str:
    """The page of a target, after checks that hold for any target."""
    done = reproduce(request)
    assert done.report.failures == {}
    assert done.outcome.problems == ()
    assert all(c.values for c in done.outcome.cells)
    assert done.report.trained
    page = done.page.with_name("table.md").read_text()
    assert page.startswith(f"# {name}: ")
    drawings = list(done.page.parent.glob("*.svg"))
    assert drawings
    assert all(f"]({d.name})" in page for d in drawings)
    # The same command finds all of it done.
    assert reproduce(request).report.trained == ()
    return page


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in FEDDRM if n != "feddrm/heart"])
def test_feddrms_tables_and_figures(name: str, tmp_path: Path) -> None:
    table = study(name)
    sets = SETS.get(name, "cifar-10")
    column = next(c for c in table.columns if c.dataset == sets)
    small = () if name in OWN_NETWORK else ("model.name=lenet-gn-small",)
    small = ("data.limit=400",) if name == "feddrm/small" else small
    request = Request(
        name, tmp_path, (sets,), (column.split,), ("feddrm",), (0,),
        rounds=2 * table.rounds // column.rounds, overrides=(*TINY, *small),
    )  # fmt: skip
    page = drawn(name, request)
    if name == "feddrm/fig7":
        text = (tmp_path / "fig7" / "retina-M=3-train_loss.svg").read_text()
        assert "training loss, nats" in text
        assert "<polyline" in text
        assert "Class ratios: in the publishers" in page
    if name == "feddrm/fig5":
        assert "FedDRM, client" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_mades_tables_and_figures(name: str, tmp_path: Path) -> None:
    """With fewer rounds of densities by -c, as a user shortens them."""
    densities = name in ("made/table1", "made/fig2")
    overrides = ("training.steps=2", *["method.density_rounds=1"] * densities)
    rows = ("fedavg", "made") if densities else ()
    whole = Request(name, tmp_path, ("femnist-digits",))
    splits = (make_plan(whole).study.columns[0].split,)
    request = Request(
        name, tmp_path, ("femnist-digits",), splits, rows, (0,), rounds=2, overrides=overrides
    )
    page = drawn(name, request)
    assert ("Changed from the protocol: method.density" in page.replace("\\", "")) == densities
