"""The backends by name: the one list of them, read without waiting for torch."""

from __future__ import annotations

# Other ways to train clients one by one: the function that makes one of `loop`, or of workers.
ONE_BY_ONE = {"channels-last": "fedshift.engine.one_by_one:channels_last"}
# Those of them that "auto" tries for images alone.
ON_IMAGES = ("channels-last",)
NAMES = ("loop", "workers", "stacked", "dense", *ONE_BY_ONE, "cuda", "cuda-loop", "auto")
# Those that can train several clients at once, in processes.
SPREAD = ("workers", "dense", *ONE_BY_ONE, "auto")
# Runs that name no backend: one of two with the same numbers (`engine.choosing.loop_or_workers`).
QUICKER = "loop or workers"
# Those of one process whose numbers do not depend on how fast they are.
ALONE = tuple(name for name in NAMES if name not in ("workers", "auto"))
# Those that train whatever the loop trains, or find out themselves what they can.
FIT = ("loop", "workers", QUICKER, "cuda-loop", "auto")
# Those of earlier versions, each with what to take instead: refused with that advice.
GONE = {"winograd": "channels-last"}
# How each is written in Python.
IN_PYTHON = {
    "loop": "leave backend out",
    "workers": "write `with workers(federation.clients, 2) as team:` "
    "(fedshift.engine.processes.pool) and give backend=team",
    "stacked": "give backend=Stacked() (fedshift.engine.stacking.stacked)",
    "dense": "give backend=Stacked(dense=True) (fedshift.engine.stacking.stacked)",
    "winograd": "it is gone: give backend=channels_last(loop) (fedshift.engine.one_by_one)",
    "cuda": 'give backend=on("cuda", Stacked()) (fedshift.engine.device)',
    "cuda-loop": 'give backend=on("cuda", loop) (fedshift.engine.device)',
    "auto": "that is for the command line; leave it out, or give one, such as Stacked()",
} | {
    name: f"give backend={made.partition(':')[2]}(loop) ({made.partition(':')[0]})"
    for name, made in ONE_BY_ONE.items()
}
