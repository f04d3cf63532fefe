"""Progress bars over the rounds of a run, on a terminal and in a notebook."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from fedshift.errors import visible
from fedshift.record.drops import news_text


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as percent; a dash for None and NaN."""
    # value != value is true only of NaN.
    return "–" if value is None or value != value else f"{100 * value:.{digits}f}"


@contextlib.contextmanager
def ignore_write_errors(stream: TextIO) -> Iterator[None]:
    """Go on silently if the output cannot be written any more: a closed pipe, a full disk."""
    try:
        yield
    except OSError:
        # Send everything that is written later to nowhere, so that it raises no more errors.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _Stderr:
    """stderr for rich's bars, which ignores errors of writing.

    Rich also draws from a thread of its own, where an error could not be caught. The stream is
    taken now, because rich replaces sys.stderr while bars are drawn.
    """

    def __init__(self) -> None:
        self.stream = sys.stderr

    def write(self, text: str) -> int:
        with ignore_write_errors(self.stream):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with ignore_write_errors(self.stream):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def for_bars() -> Console:
    """The console for progress bars. If its terminal is closed, the run goes on."""
    return Console(file=cast(TextIO, _Stderr()))


class LiveProgress:
    """A bar for each run on a terminal, with its latest loss and accuracies."""

    def __init__(self, console: Console | None = None) -> None:
        target = console or for_bars()
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<16}", markup=False),
            # 72 columns are taken by the run's name, its rounds, the time and the scores.
            BarColumn(bar_width=max(6, min(24, target.width - 72))),
            TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[scores]}", markup=False),
            console=target,
        )
        self.tasks: dict[str, Any] = {}
        self.seen: dict[str, dict[str, Any]] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        run = event["run"]
        if event["event"] == "start":
            self.tasks[run] = self.bars.add_task(visible(run), total=event["rounds"], scores="")
            self.seen[run] = {}
        elif event["event"] == "round":
            scores = of_round(event, self.seen[run])
            self.bars.update(self.tasks[run], completed=event["round"], scores=scores)
        elif event["event"] == "evaluation":
            self.seen[run] = event
            self.bars.update(self.tasks[run], scores=scores_in(event))
        elif line := news_text(event):
            self.bars.console.print(f"{visible(run)}: {line}", markup=False, highlight=False)

    def __enter__(self) -> LiveProgress:
        self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()


class NotebookProgress:
    """A line for each run in a notebook's output, redrawn after each round."""

    def __init__(self) -> None:
        from IPython.display import display

        self.lines: dict[str, tuple[int, int, str]] = {}
        self.seen: dict[str, dict[str, Any]] = {}
        self.handle = display(self._drawn(), raw=True, display_id=True)

    def __call__(self, event: dict[str, Any]) -> None:
        run = event["run"]
        done, rounds, text = self.lines.get(run, (0, event.get("rounds", 0), ""))
        if event["event"] == "round":
            done, text = event["round"], of_round(event, self.seen.get(run, {}))
        elif event["event"] == "evaluation":
            self.seen[run], text = event, scores_in(event)
        self.lines[run] = (done, rounds, text)
        self.handle.update(self._drawn(), raw=True)

    def _drawn(self) -> dict[str, str]:
        """The lines as HTML, and as text for viewers of notebooks without HTML."""
        drawn, plain = [], []
        for run, (done, rounds, text) in self.lines.items():
            bar = f'<progress value="{done}" max="{rounds}"></progress>'
            drawn.append(f"{escape(visible(run))} {bar} {done}/{rounds} {escape(text)}")
            plain.append(f"{visible(run)} {done}/{rounds} {text}")
        return {"text/html": "<br>".join(drawn), "text/plain": "\n".join(plain)}


@contextlib.contextmanager
def shown_progress(
    wanted: bool | None, live: Any = LiveProgress, notebook: Any = NotebookProgress
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A listener that draws progress.

    wanted: whether to draw; None: if stderr is a terminal, or this is a notebook.
    """
    if in_notebook() and wanted is not False:
        yield notebook()
    elif wanted or (wanted is None and sys.stderr.isatty()):
        with live() as drawn:
            yield drawn
    else:
        yield lambda event: None


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def of_round(event: dict[str, Any], seen: dict[str, Any]) -> str:
    """A round's loss, and the latest evaluation, `seen`; {} if there was none yet."""
    if "train_loss" not in event:  # `NotebookRuns` counts runs as rounds, which have no loss
        return ""
    loss = f"loss {_number(event['train_loss'], '.3f')}"
    return f"{loss} (round {seen['round']}: {_accuracies(seen)})" if seen else loss


def scores_in(event: dict[str, Any]) -> str:
    """The main numbers of an evaluation, in a few words."""
    return f"loss {_number(event['train_loss'], '.3f')} {_accuracies(event)}"


def _number(value: float | str | None, form: str) -> str:
    """A number of an event as text.

    Events of a federation come from JSON, which has null for NaN and text for infinity.
    """
    number = math.nan if value is None else float(value)
    return "–" if math.isnan(number) else f"{number:{form}}"


def _accuracies(event: dict[str, Any]) -> str:
    names = {"target": "target_accuracy", "est.": "estimated_accuracy"}
    if "system_accuracy" in event:
        names = {"system": "system_accuracy", "own": "average_accuracy"}
    scores = [f"{name} {percent(event[key])}%" for name, key in names.items()]
    if "estimated_rmse" in event:
        rmse, estimated = (_number(event[k], ".4g") for k in ("rmse", "estimated_rmse"))
        scores = [f"RMSE {rmse} est. {estimated}"]
    return " ".join([*scores, *([f"of {event['scored_by']}"] if "scored_by" in event else [])])
