"""Small RETINA and heart-disease folders in their known layouts, generated."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

from fedshift_papers.datasets import heart
from support.image_fixtures import png

# Images without and with glaucoma of each site in the small RETINA.
SMALL = {"ACRIMA": (4, 6), "RIM-ONE": (7, 3), "REFUGE": (9, 4)}
FOLDERS = {"ACRIMA": "kaggle_arima", "RIM-ONE": "RIM", "REFUGE": "REFUGE"}
OPEN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"


def shade(site: str, glaucoma: bool, k: int) -> tuple[int, int, int]:
    """The colour of image k of a class at a site."""
    return 70 * list(SMALL).index(site), 90 * glaucoma, 20 * k


def put(path: Path, rgb: tuple[int, int, int]) -> Path:
    """Write an image of one colour to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(rgb))
    return path


def write_tree(folder: Path, names: tuple[str, str] = ("Normal", "Glaucoma")) -> Path:
    """FedLGD's tree; the first two images of each class are for testing."""
    for site, counts in SMALL.items():
        for glaucoma, count in enumerate(counts):
            for k in range(count):
                part = "Testing" if k < 2 else "Training"
                place = folder / FOLDERS[site] / part / names[glaucoma] / f"{k}.png"
                put(place, shade(site, bool(glaucoma), k))
    return folder


def write_acrima(folder: Path) -> Path:
    """ACRIMA's own layout; one file ends in capitals, as in the original."""
    normal, glaucoma = SMALL["ACRIMA"]
    for k in range(normal):
        put(folder / f"Im{k + 1:03d}_ACRIMA.png", shade("ACRIMA", False, k))
    for k in range(glaucoma):
        ending = "PNG" if k == 0 else "png"
        put(folder / f"Im{normal + k + 1:03d}_g_ACRIMA.{ending}", shade("ACRIMA", True, k))
    return folder


def write_rim(folder: Path, partition: str = "partitioned_randomly") -> Path:
    """One of RIM-ONE DL's two partitions."""
    for glaucoma, name in enumerate(("normal", "glaucoma")):
        for k in range(SMALL["RIM-ONE"][glaucoma]):
            part = "test_set" if k < 2 else "training_set"
            place = folder / partition / part / name / f"r{1 + k % 3}_Im{k:03d}.png"
            put(place, shade("RIM-ONE", bool(glaucoma), k))
    return folder


def write_refuge(folder: Path, sheet_of: str = "xlsx") -> Path:
    """REFUGE: 4 + 2 images in Training400, 3 + 1 to validate, 2 + 1 to test, with their sheets."""
    for k in range(4):
        put(folder / f"Training400/Non-Glaucoma/n{k:04d}.jpg", shade("REFUGE", False, k))
    for k in range(2):
        put(folder / f"Training400/Glaucoma/g{k:04d}.jpg", shade("REFUGE", True, k))
    parts = (
        ("REFUGE-Validation400/V", (0, 1, 0, 0), "REFUGE-Validation400-GT/Fovea_locations",
         ("ID", "ImgName", "Fovea_X", "Fovea_Y", "Glaucoma Label")),
        ("Test400/T", (1, 0, 0), "REFUGE-Test-GT/Glaucoma_label_and_Fovea_location",
         ("ID", "ImgName", "Label(Glaucoma=1)", "Fovea_X", "Fovea_Y")),
    )  # fmt: skip
    for stem, labels, sheet, header in parts:
        rows: list[tuple[object, ...]] = [header]
        for k, label in enumerate(labels):
            image = put(folder / f"{stem}{k + 1:04d}.jpg", shade("REFUGE", bool(label), k)).name
            values = {"ID": k + 1, "ImgName": image, "Fovea_X": 812.5, "Fovea_Y": 99.25}
            rows.append(tuple(values.get(name, label) for name in header))
        place = folder / f"{sheet}.{sheet_of}"
        place.parent.mkdir(parents=True, exist_ok=True)
        if sheet_of == "csv":
            place.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
        else:
            write_xlsx(place, rows)
    return folder


def write_originals(folder: Path, sheet_of: str = "xlsx") -> Path:
    """All three sites in their own layouts, unpacked into one folder."""
    write_acrima(folder / "Database" / "Images")
    write_rim(folder / "RIM-ONE_DL_images")
    return write_refuge(folder, sheet_of)


def write_xlsx(path: Path, rows: Sequence[Sequence[object]], inline: bool = False) -> Path:
    """A workbook of one sheet, texts shared (as spreadsheet programs do) or inline."""
    texts = sorted({str(v) for row in rows for v in row if isinstance(v, str)})
    lines = []
    for j, row in enumerate(rows, 1):
        cells = []
        for i, value in enumerate(row):
            place = f'r="{chr(ord("A") + i)}{j}"'
            if not isinstance(value, str):
                cells.append(f"<c {place}><v>{value}</v></c>")
            elif inline:
                cells.append(f'<c {place} t="inlineStr"><is><t>{value}</t></is></c>')
            else:
                cells.append(f'<c {place} t="s"><v>{texts.index(value)}</v></c>')
        lines.append(f'<row r="{j}">{"".join(cells)}</row>')
    # The last text is cut in two runs, as where a part of it has a format of its own.
    strings = [f"<si><t>{text}</t></si>" for text in texts[:-1]]
    strings += [f"<si><r><t>{t[:2]}</t></r><r><t>{t[2:]}</t></r></si>" for t in texts[-1:]]
    parts = {
        "[Content_Types].xml": "<Types/>",
        "xl/workbook.xml": f'<workbook xmlns="{OPEN}"/>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{OPEN}"><sheetData>{"".join(lines)}'
        "</sheetData></worksheet>",
    }
    if not inline:
        parts["xl/sharedStrings.xml"] = f'<sst xmlns="{OPEN}">{"".join(strings)}</sst>'
    return write_parts(path, parts)


def write_parts(path: Path, parts: dict[str, str]) -> Path:
    """A zip archive of these texts."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, '<?xml version="1.0" encoding="UTF-8"?>' + text)
    path.write_bytes(out.getvalue())
    return path


HEART_ROW = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"
HEART_ROWS = (
    (HEART_ROW, "41,0,2,130,204,0,2,172,0,1.4,1,0,3,0", "67,1,4,160,286,0,2,108,1,1.5,2,3,?,2"),
    ("28,1,2,130,132,0,2,185,0,0,?,?,?,0", "29,1,2,140,?,0,0,170,0,.5,-9,?,?,1"),
    ("32,1,1,95,0,?,0,127,0,.7,1,?,?,1", "46,1,4,100,0,?,1,133,0,-2.6,2,?,?,3"),
    ("55,1,3,0,228,0,0,155,0,1.5,2,?,?,0", "77,1,4,124,171,0,1,110,1,2,1,?,7,4"),
)


def write_heart(folder: Path) -> Path:
    """The four files with two or three patients each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(heart.FILES, HEART_ROWS, strict=True):
        (folder / name).write_text("\n".join(rows) + "\n")
    return folder
