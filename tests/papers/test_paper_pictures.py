"""Figures that are drawn from data alone."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.datasets import load
from fedshift.errors import InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.task.preparing import prepare
from fedshift.shifts.covariate import bit_pool
from fedshift_papers.pictures.clients import partition_panel
from fedshift_papers.pictures.figures import figures, ratio_table
from fedshift_papers.pictures.sheets import mosaic, png, sheet
from fedshift_papers.reproduce.catalogue import study
from fedshift_papers.reproduce.figure_pages import draw
from fedshift_papers.reproduce.reproduce import Request
from support.command_line import code_of
from support.made_up_images import write_images

# Those of label counts are in test_weight_pictures.py.
NAMES = sorted(name for name, figure in figures().items() if figure.of_counts is None)


@pytest.fixture(scope="module", autouse=True)
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield write_images(tmp_path_factory.mktemp("images"), patch)


def request_of(name: str, out: Path) -> Request:
    sets = ("femnist-digits",) if name == "made/fig1" else ()
    return Request(name, out, sets, rounds=2 if figures()[name].rounds else None)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_drawn_in_small(name: str, tmp_path: Path) -> None:
    figure = figures()[name]
    done = draw(figure, request_of(name, tmp_path))
    assert done.problems == ()
    files = {p.name: p.read_bytes() for p in done.page.parent.iterdir()}
    drawings = [n for n in files if n.endswith(".svg")]
    assert len(drawings) >= len(done.shown)
    page, document = files["table.md"].decode(), json.loads(files["results.json"])
    assert page.startswith(f"# {name}: ")
    assert document["drawings"] == sorted(drawings)
    for drawing in drawings:
        assert f"]({drawing})" in page
        assert "<image " in files[drawing].decode() or "<polyline" in files[drawing].decode() \
            or "<rect" in files[drawing].decode()  # fmt: skip
    assert b"img-src data:" in files["index.html"]
    draw(figure, request_of(name, tmp_path))
    assert {p.name: p.read_bytes() for p in done.page.parent.iterdir()} == files


# ------------------------------------------------------------------------- sheets of images


def embedded(drawing: str) -> np.ndarray:
    (text,) = re.findall(r"data:image/png;base64,([^\"]+)", drawing)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def test_a_png_holds_every_pixel() -> None:
    """Read by another library."""
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    assert (np.asarray(Image.open(io.BytesIO(png(pixels)))) == pixels.numpy()).all()
    with pytest.raises(InputError, match="uint8"):
        png(pixels.float())


def test_tiles_stand_in_rows_and_columns() -> None:
    tiles = torch.rand(2, 3, 1, 4, 5)
    whole = mosaic(tiles)
    assert whole.shape == (2 * 6 - 2, 3 * 7 - 2, 3)
    part = whole[6:10, 7:12]
    assert torch.equal(part, (255 * tiles[1, 1, 0]).round().byte()[..., None].expand(-1, -1, 3))
    assert (whole[4:6] == 255).all()
    assert embedded(sheet("t", ["a", "b"], ["x", "y", "z"], tiles)).shape == whole.shape
    with pytest.raises(InputError, match="names for"):
        sheet("t", ["a"], ["x", "y", "z"], tiles)


def test_each_row_of_looks_is_its_look(tmp_path: Path) -> None:
    done = draw(figures()["feddrm/fig8"], request_of("feddrm/fig8", tmp_path))
    pixels = embedded(done.shown["cifar-10"].panels["picture-1.svg"].drawing)
    image = load("cifar-10").train.x[:1].float() / 255
    for i, look in enumerate(bit_pool("high")):
        shown = pixels[34 * i : 34 * i + 32, :32]
        expected = (255 * look(image))[0].round().byte().permute(1, 2, 0).numpy()
        assert (shown == expected).all()
        assert not (shown == (255 * image[0]).byte().permute(1, 2, 0).numpy()).all()


# ------------------------------------------------------------------------- partitions


@pytest.mark.slow
def test_partitions_are_those_of_the_runs() -> None:
    column = study("feddrm/table1").columns[1]
    assert column.split == "SPC=5"
    drawing = partition_panel(column, "cifar-10", 3).drawing
    config = validate({**{k: dict(v) for k, v in column.settings.items()}, "seeds": {"run": 3}})
    task = prepare(config).task
    for i, (client, test) in enumerate(zip(task.clients, task.tests, strict=True)):
        counts = torch.bincount(torch.cat([client.y, test.y]), minlength=10)
        for name, n in zip(task.classes, counts.tolist(), strict=True):
            assert (f"<title>client {i}, {name}: {n:,}</title>" in drawing) == (n > 0)
    assert partition_panel(column, "cifar-10", 4).drawing != drawing


def test_retinas_ratios_stand_beside_the_papers() -> None:
    rows = {row[0]: row[1:] for row in ratio_table().rows}
    assert {site: row[:2] for site, row in rows.items()} == {
        "ACRIMA": (396, 309), "RIM-ONE": (172, 313), "REFUGE": (120, 1080),
    }  # fmt: skip
    assert [row[4] for row in rows.values()] == [1.34, 1.94, 0.46]
    assert rows["RIM-ONE"][2] == pytest.approx(172 / 313)


# ------------------------------------------------------------------------- the command


def test_without_its_data_a_figure_shows_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert code_of(monkeypatch, "reproduce", "feddrm/fig14", "--out", str(tmp_path / "o")) == 3
    out, err = capsys.readouterr()
    assert 'not drawn: data set "retina" was not found' in err
    assert "1.34" in out
    assert "1.34" in (tmp_path / "o" / "fig14" / "table.md").read_text()
    assert (
        code_of(
            monkeypatch, "reproduce", "feddrm/fig14", "--out", str(tmp_path), "--format", "json"
        )
        == 3
    )
    assert json.loads(capsys.readouterr().out)["tables"][0]["rows"][2][5] == 0.46


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["feddrm/fig8", "--methods", "fedavg"], "--methods: nothing is trained for feddrm/fig8"),
        (["feddrm/fig8", "--rounds", "3"], "--rounds: nothing is trained for feddrm/fig8"),
        (["feddrm/fig3", "--rounds", "0"], "--rounds 0; give 1 or more"),
        (["feddrm/fig8", "--seeds", "0-1"], "--seeds: feddrm/fig8 is drawn for one seed"),
        (["feddrm/fig8", "--dataset", "cifar10"], 'unknown data set of feddrm/fig8 "cifar10"'),
        (["made/fig8"], 'unknown table or figure "made/fig8"'),
    ],
)
def test_options_that_a_figure_does_not_have_are_refused(
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of(monkeypatch, "reproduce", *args) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())
