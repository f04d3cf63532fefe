"""What the page of central tuning says of its goals is what the results have."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "methods" / "central_tuning.md"
PLACES = ("labelsets", "labelsets-cifar-10", "labelsets-round3")
ROW = re.compile(
    r"^\| (?P<data>[\w-]+) \| C=(?P<labels>\d)-E=(?P<epochs>\d+) \| "
    r"(?P<mode>\w+) FedAvg \+ KL in 3 rounds \|.*?\| (?P<gain>[+-][\d.]+) \("
)


def gains(place: str) -> dict[tuple[str, str, int, int], str]:
    """(data, mode, labels per client, local epochs) -> what KL in three rounds gains."""
    text = (ROOT / "results" / place / "tuning" / "table.md").read_text(encoding="utf-8")
    rows = [m for line in text.splitlines() if (m := ROW.match(line))]
    return {(m["data"], m["mode"], int(m["labels"]), int(m["epochs"])): m["gain"] for m in rows}


def missing(page: str) -> list[str]:
    """Words that the results ask for, and the page lacks."""
    usual, photos, early = (gains(place) for place in PLACES)

    def worst(mode: str) -> str:
        some = {k: v for k, v in (usual | photos).items() if k[1] == mode and k[2] >= 3}
        return min(some.values(), key=float)

    lowest = min((float(v), k) for k, v in usual.items() if k[1] == "public" and k[2] >= 3)
    assert lowest[1] == ("Fashion-MNIST", "public", 3, 10)
    text = " ".join(page.split())
    due = (
        f"private sets, where the worst cell has {worst('private')}.",
        f"public ones, where the worst has {worst('public')} (the whole of Fashion-MNIST, three",
        f"table.md) with {early['Fashion-MNIST-mini', 'private', 3, 10]}.",
        f"table.md) has {usual['Fashion-MNIST', 'private', 3, 10]}, and",
        f"table.md) {photos['CIFAR-10', 'private', 3, 10]}.",
    )
    return [words for words in due if words not in text]


def test_the_page_has_the_results_numbers() -> None:
    assert missing(PAGE.read_text(encoding="utf-8")) == []


def test_any_other_number_would_be_seen() -> None:
    page = PAGE.read_text(encoding="utf-8")
    start = page.index("Two goals were set")
    numbers = list(re.finditer(r"[+-]\d+\.\d", page[start : page.index("## Will it pay?")]))
    assert len(numbers) == 5
    for number in numbers:
        at = start + number.end() - 1
        assert missing(page[:at] + str((int(page[at]) + 1) % 10) + page[at + 1 :]), number[0]
