"""The backends by name: one list for the command line, for runs and for messages; without torch."""

from __future__ import annotations

from typing import Literal, get_args

_Together = Literal["stacked", "dense", "channels-last", "winograd", "cuda", "cuda-loop"]
# Those of one process whose numbers do not depend on which is fastest.
Alone = Literal["loop", _Together]
Name = Literal["loop", "workers", _Together, "auto"]
NAMES: tuple[str, ...] = get_args(Name)
ALONE: tuple[str, ...] = get_args(Alone)
# Those that can train several clients at once, in processes.
SPREAD = ("workers", "dense", "channels-last", "winograd", "auto")
# Those that train whatever the loop trains, or find out themselves what they can.
FIT = ("loop", "workers", "cuda-loop", "auto")
# How each is written in Python.
IN_PYTHON = {
    "loop": "leave backend out",
    "workers": "write `with workers(federation.clients, 2) as team:` "
    "(fedshift.engine.processes.pool) and give backend=team",
    "stacked": "give backend=Stacked() (fedshift.engine.stacked)",
    "dense": "give backend=Stacked(dense=True) (fedshift.engine.stacked)",
    "channels-last": "give backend=channels_last(loop) (fedshift.engine.levers)",
    "winograd": "give backend=winograd(loop) (fedshift.engine.levers)",
    "cuda": 'give backend=on("cuda", Stacked()) (fedshift.engine.device)',
    "cuda-loop": 'give backend=on("cuda", loop) (fedshift.engine.device)',
    "auto": "that is for the command line; leave it out, or give one, such as Stacked()",
}
