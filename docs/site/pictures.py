"""Pictures of the pages: `python docs/site/pictures.py [NAME...]` draws docs/pictures/NAME.svg."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from runpy import run_path

from plain_bars import WIDTH, Bar, bars
from readme_picture import readme
from split_pictures import split_pictures

import fedshift as fs
from fedshift.report.looks import look_of
from fedshift.report.shapes import alone, document

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"


def hospitals() -> fs.Task:
    """The tutorial's task."""
    with tempfile.TemporaryDirectory() as place:
        path = str(Path(place) / "patients.csv")
        run_path(str(ROOT / "examples/breast_cancer.py"))["write"](path)
        return fs.Task.from_csv(path, client="hospital", label="outcome", target="north")


def tutorial() -> str:
    """Malignant tumours of each hospital, of FedAvg's mixture and FedPALS', beside the target's."""
    task = hospitals()
    built, diagnosis = task.build(), task.diagnose()
    counts = built.task.table()["labels"].numpy()
    malignant = diagnosis.labels[1]
    shares = [
        (name, "var(--heat)", row[1] / row.sum())
        for name, row in zip(built.clients, counts, strict=True)
    ]
    shares += [
        ("FedAvg's mixture", look_of("fedavg").ink, malignant.fedavg),
        ("FedPALS' mixture", look_of("fedpals").ink, malignant.pals),
    ]
    rows = [Bar(name, share, f"{share:.0%}", colour) for name, colour, share in shares]
    heading = "malignant; the line: north, the target"
    drawing, height = bars(heading, rows, 20, left=130, mark=malignant.target)
    title = "Malignant tumours of each hospital and of two mixtures, beside the target's"
    return document(title, WIDTH, height, [drawing])


PICTURES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "tutorial": tutorial,
    **split_pictures(),
}


def drawn(name: str) -> str:
    """A picture on white paper, which is read on dark pages, too."""
    return alone(PICTURES[name]()) + "\n"


def main() -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", choices=[*PICTURES, []], help="without any: all")
    for name in parser.parse_args().name or PICTURES:
        (FOLDER / f"{name}.svg").write_text(drawn(name), encoding="utf-8")


if __name__ == "__main__":
    main()
