"""Pictures of the pages: `python docs/site/pictures.py [NAME...]` draws docs/pictures/NAME.svg."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from runpy import run_path

from readme_picture import readme
from split_pictures import split_pictures

import fedshift as fs
from fedshift.report.svg import Axis, side_bars

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
    names = [*built.clients, "FedAvg's mixture", "FedPALS' mixture"]
    shares = [*(counts[:, 1] / counts.sum(1)).tolist(), malignant.fedavg, malignant.pals]
    axis = Axis("malignant tumours; the line is north, the target", percent=True)
    title = "Malignant tumours of each hospital and of two mixtures, beside the target's"
    return side_bars(title, names, shares, axis, mark=malignant.target)


PICTURES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "tutorial": tutorial,
    **split_pictures(),
}


def drawn(name: str) -> str:
    """A picture with a white ground, so that it is read on dark pages, too."""
    head, title, rest = PICTURES[name]().partition("</title>")
    return f'{head}{title}<rect width="100%" height="100%" rx="6" fill="#ffffff"/>{rest}\n'


def main() -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", choices=[*PICTURES, []], help="without any: all")
    for name in parser.parse_args().name or PICTURES:
        (FOLDER / f"{name}.svg").write_text(drawn(name), encoding="utf-8")


if __name__ == "__main__":
    main()
