"""Sheets of small images as SVG; all their pixels are in a single PNG inside it."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.report.charts import letters, shortened
from fedshift.report.columns import column_names
from fedshift.report.shapes import document, number, text

WIDTH, LARGEST, GAP = 760.0, 64.0, 2


def png(pixels: Tensor) -> bytes:
    """A picture [h, w, 3] of bytes as the content of a PNG file, which is lossless.

    Raises InputError for another shape or type.
    """
    if pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[2] != 3:
        raise InputError(f"pixels {pixels.dtype} {tuple(pixels.shape)}; allowed: uint8 [h, w, 3]")
    high, wide = pixels.shape[:2]
    # PNG wants the number of a filter before each line; 0 means no filter.
    lines = torch.cat([torch.zeros(high, 1, dtype=torch.uint8), pixels.reshape(high, -1)], 1)
    header = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    parts = (
        (b"IHDR", header),
        (b"IDAT", zlib.compress(lines.numpy().tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(name: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + checksum


def mosaic(tiles: Tensor) -> Tensor:
    """Images [R, C, 1 or 3, h, w] in [0, 1] -> bytes [R (h + 2) - 2, C (w + 2) - 2, 3].

    White lines of two pixels stand between them.
    """
    rows, columns, channels, high, wide = tiles.shape
    colours = tiles.expand(-1, -1, 3, -1, -1) if channels == 1 else tiles
    paper = torch.full((rows, columns, high + GAP, wide + GAP, 3), 255, dtype=torch.uint8)
    paper[:, :, :high, :wide] = (255 * colours).round().clamp(0, 255).byte().movedim(2, 4)
    whole = paper.permute(0, 2, 1, 3, 4).reshape(rows * (high + GAP), columns * (wide + GAP), 3)
    return whole[:-GAP, :-GAP].contiguous()


def sheet(title: str, rows: Sequence[str], columns: Sequence[str], tiles: Tensor) -> str:
    """An SVG drawing of tiles [R, C, 1 or 3, h, w] in [0, 1] under names of rows and columns.

    Raises InputError where names and tiles differ in number.
    """
    if tiles.shape[:2] != (len(rows), len(columns)):
        raise InputError(
            f"{len(rows)} and {len(columns)} names for {tuple(tiles.shape[:2])} rows and columns"
        )
    names = [shortened(row, 52) for row in rows]
    left = 14 + max(map(letters, names)) * 6.2
    across = min(LARGEST, (WIDTH - left - 10) / len(columns))
    heads, top = column_names(columns, left, across, 0.0, down=False)
    down = across * (tiles.shape[3] + GAP) / (tiles.shape[4] + GAP)
    body = [heads]
    for i, name in enumerate(names):
        body.append(text(left - 6, top + (i + 0.5) * down + 4, name, "end", 11))
    inside = base64.b64encode(png(mosaic(tiles))).decode()
    size = f'width="{number(across * len(columns))}" height="{number(down * len(rows))}"'
    body.append(
        f'<image x="{number(left)}" y="{number(top)}" {size} preserveAspectRatio="none" '
        f'style="image-rendering: pixelated" href="data:image/png;base64,{inside}"/>'
    )
    return document(title, WIDTH, top + down * len(rows) + 10, body)
