"""The HTML building blocks of reports, and the page around them."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.report.charts import Chart
from fedshift.report.looks import THEME
from fedshift.report.shapes import escape
from fedshift.report.svg import NARROW, svg
from fedshift.report.tables import Table, html_table

# Tables with more rows are folded at first.
LONG_TABLE = 14
# No source is allowed at all: a browser that follows the policy loads nothing for this page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def _variables(which: int) -> str:
    return " ".join(f"--{name}: {pair[which]};" for name, pair in THEME.items())


# Every chart is in the page twice, wide and narrow: the wide one could not be read on a telephone.
_STYLE = (
    f"""
:root {{ color-scheme: light dark; {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
@media print {{ :root {{ color-scheme: light; {_variables(0)} }} }}
"""
    + """
body { margin: 0 auto; max-width: 54rem; padding: 1.5rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem;
  border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p, ul { margin: .4rem 0 .8rem; }
.lead { color: var(--soft); margin-bottom: 1rem; }
.why { background: var(--box); border-left: 4px solid var(--c1); padding: .6rem 1rem;
  margin: 1rem 0; }
.why ul { margin: 0; padding-left: 1.1rem; } .why h3 { margin: .3rem 0; }
figure { margin: .75rem 0; } figcaption { color: var(--soft); font-size: .875rem; }
svg { display: block; width: 100%; height: auto; } .page svg { max-width: 760px; }
.phone { display: none; max-width: 480px; }
@media screen and (max-width: 720px) { .page { display: none; } .phone { display: block; } }
/* A shadow at the side where a table goes on: the sheets of paper over it scroll with the table. */
.wide { overflow-x: auto; background:
  linear-gradient(90deg, var(--paper) 40%, transparent) left / 2.5rem 100% no-repeat local,
  linear-gradient(270deg, var(--paper) 40%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(90deg, var(--rule), transparent) left / .9rem 100% no-repeat,
  linear-gradient(270deg, var(--rule), transparent) right / .9rem 100% no-repeat; }
table { border-collapse: collapse; font-size: .875rem; margin: .5rem 0;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .25rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--grid); text-align: left;
  vertical-align: baseline; }
th, td { max-width: 22rem; overflow-wrap: break-word; }
td:first-child { min-width: 6rem; }
/* As wide as its words: rows stay one line high, and the table scrolls. */
@media screen and (min-width: 721px) { .wide table { width: max-content; } }
thead th { border-bottom: 2px solid var(--rule); vertical-align: bottom; }
.num { text-align: right; } td.num { white-space: nowrap; }
summary { cursor: pointer; color: var(--link); font-size: .875rem; }
a { color: var(--link); }
pre { background: var(--box); padding: .75rem; font-size: .8rem; overflow-x: auto; }
code { }
@media print {
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  figure, tr { break-inside: avoid; } h2, h3, summary { break-after: avoid; }
  .wide { overflow: visible; background: none; } pre { white-space: pre-wrap; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""
)


def html_page(heading: str, parts: Sequence[str], *, images: bool = False) -> str:
    """The parts as the text of a self-contained HTML file.

    images: drawings hold pictures, as data inside the page
    """
    policy = _POLICY + "; img-src data:" * images
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{escape(heading)}</h1>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    )


def why(content: str) -> str:
    """The box at the top that explains the results."""
    return f'<div class="why" id="why">{content}</div>'


def items(sentences: Sequence[str]) -> str:
    """Sentences as a list."""
    return "<ul>" + "".join(f"<li>{escape(s)}</li>" for s in sentences) + "</ul>"


def section(name: str, heading: str, *parts: str) -> str:
    """A named section under a heading."""
    return f'<section id="{name}"><h2>{escape(heading)}</h2>\n' + "\n".join(parts) + "</section>"


def figure(chart: Chart, caption: str) -> str:
    """A chart with its caption, drawn for a page and for a telephone."""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    narrow = svg(chart, NARROW)
    return (
        f'<figure><div class="page">{svg(chart)}</div><div class="phone">{narrow}</div>'
        f"{words}</figure>"
    )


def note(text: str) -> str:
    """A paragraph of explanation."""
    return f'<p class="lead">{escape(text)}</p>'


def table(rows: Table, last: Sequence[str] = ()) -> str:
    """A table that scrolls if the page is narrower. last: as in `html_table`."""
    return f'<div class="wide">{html_table(rows, last)}</div>'


def fold(rows: Table) -> str:
    """A table that can be folded away. Short ones are open at first."""
    # An open long table would push the next section off the screen.
    state = " open" if len(rows.rows) <= LONG_TABLE else ""
    name = f"The numbers: {rows.caption}" if rows.caption else "The numbers"
    return f"<details{state}><summary>{escape(name)}</summary>{table(rows)}</details>"
