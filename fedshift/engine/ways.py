"""The backends by name: the one list of them, read without waiting for torch."""

from __future__ import annotations

NAMES = ("loop", "workers", "stacked", "dense", "channels-last", "cuda", "cuda-loop", "auto")
# Those that can train several clients at once, in processes.
SPREAD = ("workers", "dense", "channels-last", "auto")
# Those of one process whose numbers do not depend on how fast they are.
ALONE = tuple(name for name in NAMES if name not in ("workers", "auto"))
# Those that train whatever the loop trains, or find out themselves what they can.
FIT = ("loop", "workers", "cuda-loop", "auto")
# Those of earlier versions, each with what to take instead: refused with that advice.
GONE = {"winograd": "channels-last"}
# How each is written in Python.
IN_PYTHON = {
    "loop": "leave backend out",
    "workers": "write `with workers(federation.clients, 2) as team:` "
    "(fedshift.engine.processes.pool) and give backend=team",
    "stacked": "give backend=Stacked() (fedshift.engine.stacked)",
    "dense": "give backend=Stacked(dense=True) (fedshift.engine.stacked)",
    "channels-last": "give backend=channels_last(loop) (fedshift.engine.levers)",
    "winograd": "it is gone: give backend=channels_last(loop) (fedshift.engine.levers)",
    "cuda": 'give backend=on("cuda", Stacked()) (fedshift.engine.device)',
    "cuda-loop": 'give backend=on("cuda", loop) (fedshift.engine.device)',
    "auto": "that is for the command line; leave it out, or give one, such as Stacked()",
}
