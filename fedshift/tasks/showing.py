"""A task as a table in notebooks."""

from __future__ import annotations

from html import escape

from fedshift.tasks.building import Built

# The most rows and columns of the table: with more clients or classes, the first ones are shown.
MOST = 12


def html_of(title: str, built: Built) -> str:
    """Label counts of each client's training rows, T, and the notes, as HTML."""
    counts = built.task.table()["labels"].long().tolist()
    names = built.task.classes[:MOST]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = [
        (client, [f"{v:,}" for v in row[:MOST]])
        for client, row in zip(built.clients[:MOST], counts, strict=False)
    ]
    rows.append(
        (f"target: {built.target}", [f"{v:.1%}" for v in built.task.target[:MOST].tolist()])
    )
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for name, cells in rows
    )
    left = len(built.clients) - MOST
    more = f"<p>and {left} more clients</p>" if left > 0 else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in built.notes)
    caption = f"<caption>{escape(title)}: training rows by label</caption>"
    return f"<table>{caption}<tr><th></th>{head}</tr>{body}</table>{more}<ul>{notes}</ul>"
