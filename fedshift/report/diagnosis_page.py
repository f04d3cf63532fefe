"""A diagnosis as one self-contained HTML page."""

from __future__ import annotations

from fedshift.diagnosis import Diagnosis
from fedshift.report.charts import Axis, BarChart, Bars, LineChart, Series
from fedshift.report.layout import figure, fold, html_page, items, note, section, table, why
from fedshift.report.looks import GREY, Look, look_of
from fedshift.report.tables import Table

# More bars than this would be too thin to read. The table has all clients.
MOST_DRAWN = 50
# The weights that a diagnosis chooses are those of FedPALS, and are drawn in its colour.
PALS = look_of("fedpals")


def diagnosis_page(d: Diagnosis, *, title: str = "Diagnosis") -> str:
    """The text of an HTML file with verdict, labels, ESS against distance, and clients' weights."""
    lead = note(
        f"{d.clients} clients with data, {d.examples:.0f} examples, {len(d.labels)} labels."
    )
    parts = [lead, why(items(d.verdict)), _labels(d), _curve(d), _carriers(d)]
    return html_page(title, parts)


def label_table(d: Diagnosis) -> Table:
    """The mass of each label in the target and in three mixtures."""
    head = (
        "Label",
        "Target",
        "FedAvg",
        "Chosen weights",
        "Closest mixture",
        "Clients that have it",
    )
    rows = tuple((x.name, x.target, x.fedavg, x.pals, x.closest, x.holders) for x in d.labels)
    return Table(head, rows, ("", ".2%", ".2%", ".2%", ".2%", "d"))


def curve_table(d: Diagnosis) -> Table:
    """ESS against distance; the chosen setting is marked."""
    head = (
        "ESS", "ESS share", "Examples", "λ", "L1 distance", "L2 distance", "Cost", "Largest weight",
    )  # fmt: skip
    rows = tuple(
        (
            f"{p.name} (chosen)" if p.chosen else p.name,
            p.ess_fraction,
            p.ess,
            p.lam,
            p.l1,
            p.distance,
            p.cost,
            p.largest_weight,
        )
        for p in d.curve
    )
    return Table(head, rows, ("", ".1%", ".0f", ".4g", ".4f", ".4f", ".4f", ".1%"))


def carrier_table(d: Diagnosis) -> Table:
    """Clients by weight, with the hull distance that would be left without each of them."""
    head = ("Client", "n", "n / N", "Weight", "Hull distance without it")
    rows = tuple((c.name, c.n, c.n_share, c.weight, c.without) for c in d.carriers)
    return Table(head, rows, ("", ".0f", ".2%", ".2%", ".4f"))


def _labels(d: Diagnosis) -> str:
    names = tuple(x.name for x in d.labels)
    bars = (
        Bars("target", tuple(x.target for x in d.labels), look=Look(GREY)),
        Bars("FedAvg", tuple(x.fedavg for x in d.labels)),
        Bars("chosen weights", tuple(x.pals for x in d.labels), look=PALS),
    )
    drawing = BarChart("Mass of each label", names, bars, Axis("label mass", percent=True))
    caption = "The label distribution that training would see, beside the target's."
    return section("labels", "Labels", figure(drawing, caption), fold(label_table(d)))


def _curve(d: Diagnosis) -> str:
    x, y = tuple(p.ess_fraction for p in d.curve), tuple(p.l1 for p in d.curve)
    c = d.chosen
    series = (
        Series("attainable", x, y, look=Look(GREY), points=True),
        Series("FedAvg", (1.0,), (d.fedavg_gap,), line=False),
        Series(f"chosen: {c.name}", (c.ess_fraction,), (c.l1,), look=PALS, line=False),
    )
    across = Axis("effective sample size, share of all examples", percent=True)
    name = "Effective sample size against the distance to the target"
    drawing = LineChart(name, series, across, Axis("L1 distance", zero=True))
    rule = f"Recommended: {d.rule}." if d.chosen_by == "rule" else "Chosen by you."
    parts = [figure(drawing, rule), table(curve_table(d))]
    return section("ess", "What closeness to the target costs", *parts)


def _carriers(d: Diagnosis) -> str:
    # The diagnosis has sorted them by weight.
    largest = d.carriers[:MOST_DRAWN]
    bars = (
        Bars("FedAvg: n / N", tuple(c.n_share for c in largest)),
        Bars("chosen weights", tuple(c.weight for c in largest), look=PALS),
    )
    names = tuple(c.name for c in largest)
    drawing = BarChart("Weight of each client", names, bars, Axis("weight", percent=True))
    rest = len(d.carriers) - len(largest)
    caption = f"The largest weights; {rest} more clients are in the table." if rest else ""
    parts = [figure(drawing, caption), fold(carrier_table(d))]
    return section("clients", "Who carries the weight", *parts)
