"""The tutorial as an executed notebook: `python docs/site/notebook.py` writes docs/tutorial.ipynb.

Prose becomes cells of text, Python cells of code; blocks of output are left out, since the notebook
has those of its cells. Needs nbformat, nbclient and ipykernel (extra `dev`).
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

PAGE = Path(__file__).parents[1] / "tutorial.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
CODE = re.compile(r"```python\n(.*?)```\n(?:\s*```(?:text|console)\n.*?```\n)?", re.S)
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def notebook_of(page: str) -> nbformat.NotebookNode:
    """The cells of a page, not executed. Ids count, so that equal pages give equal notebooks."""
    cells = []
    for i, part in enumerate(CODE.split(page)):
        new = nbformat.v4.new_code_cell if i % 2 else nbformat.v4.new_markdown_cell
        if part.strip():
            cells.append(new(part.strip(), id=f"cell-{len(cells)}"))
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells in an empty folder; outputs are put into the notebook."""
    with tempfile.TemporaryDirectory() as place:
        NotebookClient(
            notebook, timeout=600, record_timing=False, resources={"metadata": {"path": place}}
        ).execute()


def main() -> None:
    """Write the notebook."""
    notebook = notebook_of(PAGE.read_text(encoding="utf-8"))
    execute(notebook)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
