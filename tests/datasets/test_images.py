"""Photographs of every file format are decoded to the right bytes."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedshift.datasets.images import Images, check_not_enlarged, decode, decode_once, read_table
from fedshift.datasets.store import Folder
from support.dataset_fixtures import refuses

# Colour types of PNG, by their number of channels.
_TYPE = {1: 0, 2: 4, 3: 2, 4: 6}


def decoded(content: bytes, place: Path, size: int) -> np.ndarray[Any, Any]:
    """The pixels [size, size, 3] of one file."""
    (place / "a.png").write_bytes(content)
    images = Images(Folder(place), ("a.png",), ("row 1",))
    return decode(images, np.array([0]), size)[0].permute(1, 2, 0).numpy()


def png_of_16_bits(values: np.ndarray[Any, Any]) -> bytes:
    """values [height, width, channels]: uint16, which Pillow does not write in colour."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, _TYPE[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_of_16_bits_the_8_high_ones_are_kept(tmp_path: Path, channels: int) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 16, (6, 6, channels)).astype(np.uint16)
    colours = values[:, :, :3] if channels > 2 else np.repeat(values[:, :, :1], 3, axis=2)
    assert np.array_equal(decoded(png_of_16_bits(values), tmp_path, 6), colours >> 8)
    # What clipping to a byte would make of them:
    assert not np.array_equal(np.minimum(colours, 255), colours >> 8)


def test_a_grey_ramp_of_16_bits_is_a_ramp(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    here = decoded(saved(Image.fromarray(ramp)), tmp_path, 64)
    assert np.array_equal(here[:, :, 0], ramp >> 8)
    assert 127 <= here.mean() <= 128


def test_fewer_bits_greys_palettes_and_transparency_give_their_colours(tmp_path: Path) -> None:
    rgb = np.random.default_rng(1).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    grey, alpha = rgb[:, :, 0], rgb[:, :, 1]
    three = np.repeat(grey[:, :, None], 3, axis=2)
    palette = Image.fromarray((grey % 4).astype(np.uint8)).convert("P")
    table = [(10, 20, 30), (40, 50, 60), (70, 80, 90), (200, 210, 220)]
    palette.putpalette([value for colour in table for value in colour])
    painted = np.array(table, dtype=np.uint8)[grey % 4]
    files = (
        (saved(Image.fromarray(rgb)), rgb),
        (saved(Image.fromarray(grey)), three),
        (saved(Image.fromarray(np.dstack([rgb, alpha]))), rgb),
        (saved(Image.fromarray(np.dstack([grey, alpha]))), three),
        (saved(Image.fromarray(grey > 127)), 255 * (three > 127).astype(np.uint8)),
        (saved(palette), painted),
        (saved(palette, transparency=bytes([0, 9, 99, 255])), painted),
    )
    for content, wanted in files:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.array_equal(decoded(content, tmp_path, 4), wanted)


def test_cmyk_becomes_the_colour_on_paper(tmp_path: Path) -> None:
    wanted = {
        (0, 0, 0, 0): (255, 255, 255),
        (0, 255, 255, 0): (255, 0, 0),
        (0, 0, 0, 255): (0,) * 3,
    }
    for inks, rgb in wanted.items():
        content = saved(Image.new("CMYK", (8, 8), inks), "JPEG", quality=100)
        assert np.abs(decoded(content, tmp_path, 8).astype(int) - rgb).max() <= 3


TURNS = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
    8: np.rot90,
}


@pytest.mark.parametrize("code", TURNS)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_photographs_are_turned_as_the_camera_was_held(
    tmp_path: Path, code: int, kind: str
) -> None:
    stored = np.kron([[0, 60, 120], [180, 220, 255], [240, 150, 30]], np.ones((8, 8)))
    stored = np.repeat(stored[:, :, None], 3, axis=2).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = code
    options = {"quality": 100} if kind == "JPEG" else {}
    here = decoded(saved(Image.fromarray(stored), kind, exif=exif, **options), tmp_path, 24)
    assert np.abs(here.astype(int) - TURNS[code](stored).astype(int)).max() <= 3
    assert code == 1 or np.abs(here.astype(int) - stored.astype(int)).max() > 50


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_what_cannot_be_read_of_exif_turns_nothing(tmp_path: Path) -> None:
    stored = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    for exif in (b"Exif\0\0nonsense", b"MM\0*\0\0\0\x08\0"):
        assert np.array_equal(
            decoded(saved(Image.fromarray(stored), exif=exif), tmp_path, 4), stored
        )
    profile = PngInfo()
    profile.add_text("Raw profile type exif", "\nexif\n 10\nzz")
    content = saved(Image.fromarray(stored), pnginfo=profile)
    assert np.array_equal(decoded(content, tmp_path, 4), stored)


@pytest.mark.parametrize("mode", ["I;16", "I", "F", "RGB"])
def test_other_formats_are_refused_whatever_they_are_called(tmp_path: Path, mode: str) -> None:
    """TIFF has values that no byte holds: 32-bit integers, and floats of any range."""
    (tmp_path / "a.png").write_bytes(saved(Image.new(mode, (4, 4)), "TIFF"))
    with refuses(tmp_path / "a.png", "not a readable JPEG or PNG image"):
        check_not_enlarged(tmp_path, 4)


def test_photographs_of_two_places_have_two_decoded_files(tmp_path: Path) -> None:
    """The same names in another folder are other images."""
    cache, means = tmp_path / "cache", []
    for place, shade in (("a", 10), ("b", 200), ("a", 90)):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "x.png").write_bytes(saved(Image.new("L", (2, 2), shade)))
        images = Images(Folder(tmp_path / place), ("x.png",), ("row 1",))
        means.append(int(decode_once(images, np.array([0]), 2, cache).float().mean()))
    # The third is what was decoded first, as the documentation says.
    assert means == [10, 200, 10]
    assert len(list(cache.iterdir())) == 2


def test_a_first_image_that_is_damaged_is_named(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG"):
        (tmp_path / name).write_bytes(b"no image")
    with refuses(tmp_path / "a.JPG", "not a readable JPEG or PNG image"):
        check_not_enlarged(tmp_path, 4)


TABLES = {
    "has the column y twice": b"y,name,y\n1,a,2\n",
    "row 2 has more values than the 2 columns of the header": b"y,name\n1,a\n2,fox, red\n",
    "row 1 is too short": b"name,y\na\n",
    "has no column y, name; it has y;name": b"y;name\n1;a\n",
}


@pytest.mark.parametrize("message", TABLES)
def test_tables_whose_columns_do_not_fit_are_refused(tmp_path: Path, message: str) -> None:
    with refuses(tmp_path, message):
        read_table(TABLES[message], tmp_path, ("y", "name"))


def test_tables_of_other_systems_are_read_alike(tmp_path: Path) -> None:
    for raw in (b"y,name\n1,a\n", b"\xef\xbb\xbfy,name\r\n1,a\r\n", b'name,y\n"a",1'):
        assert read_table(raw, tmp_path, ("y", "name")) == {"y": ["1"], "name": ["a"]}
