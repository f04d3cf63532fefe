"""One process of Flower's for all tasks of a client, which forks for each of them.

A task may last for moments, while importing torch and Flower takes seconds of processor time. So
this process imports them once, waits for the tokens of tasks, and copies itself for each. A task
still has a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable

from fedshift_deploy.chosen import APP, CHOICES, SITE, chosen, imported
from fedshift_deploy.notices import notify

# Python may copy a process safely on Linux; elsewhere, system libraries may forbid it.
# FEDSHIFT_PLAIN=1 turns this off with all other shortcuts: then each task imports what it needs.
CAN_FORK = sys.platform == "linux" and os.environ.get("FEDSHIFT_PLAIN") != "1"
UNANSWERED = "this client gave the server no answer: "
# Where the process that waits was killed, perhaps between two messages.
PERHAPS = "this client may have given the server no answer: "


def import_what_tasks_need(load: Callable[[], object]) -> None:
    """Call `load`, which imports Flower's command for tasks, and import the library's app.

    Not the app or the data source that a client's own file names: what they do when they are
    imported, such as to start threads, may not be copied. A task imports these itself.
    """
    load()
    # Whatever is wrong with an installation is reported by the task that needs it.
    with contextlib.suppress(Exception):
        imported(CHOICES[APP])
    # The garbage collector of a copy would write into all of these pages, and so copy them.
    gc.collect()
    gc.freeze()


def _leave() -> None:
    # Otherwise Python frees each object of its modules, for which their memory is copied: that
    # takes more time than a short task. No one reads the exit code of a copy.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _become_a_task() -> None:
    """Change in a copy what a process that was started for its task would have otherwise."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The next lines are not for this process, even if they have been read ahead.
    nothing = open(os.devnull)  # noqa: SIM115 - for the life of the process
    os.dup2(nothing.fileno(), 0)
    sys.stdin = nothing
    # Copies would draw the same numbers in each round: noise that repeats hides nothing. Python's
    # own generator seeds itself anew.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
    # An app or a data source of the client's may have left files open, which Python closes.
    if all(chosen(variable) == CHOICES[variable] for variable in (APP, SITE)):
        atexit.register(_leave)


def fork_for_each(lines: Iterable[str]) -> str:
    """Wait for lines, and return each of them in a process of its own. Here it never returns.

    This process ends when there are no more lines. It notifies the client's operator of processes
    that are killed.
    """
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    for line in lines:
        try:
            child = os.fork()
        except OSError as e:
            notify(trouble=f"{UNANSWERED}no process can be started for its app: {e.strerror}")
            continue
        if child == 0:
            _become_a_task()
            return line
    # Tasks that are not over go on.
    os._exit(0)


def _reap() -> None:
    """Collect the exit codes of the processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            notify_of_a_kill(os.waitstatus_to_exitcode(ended[1]))


def notify_of_a_kill(code: int, words: str = UNANSWERED) -> None:
    """Tell the client's operator at once. (Flower tells only the server, after a minute.)"""
    if code < 0 and -code not in (signal.SIGTERM, signal.SIGINT):
        how = f"was ended by signal {-code}, perhaps for lack of memory"
        notify(trouble=f"{words}the process of its app {how}")
