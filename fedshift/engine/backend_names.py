"""The names of all backends: the one list. It imports nothing, so that `--help` needs no torch."""

from __future__ import annotations

# Backends that train clients one by one in another way, and the function that makes each: it takes
# `loop` or workers, and returns the backend. A new one needs its row here, and nothing else.
ONE_BY_ONE = {"channels-last": "fedshift.engine.one_by_one:channels_last"}
# Those of them that "auto" tries only for images.
ON_IMAGES = ("channels-last",)
NAMES = ("loop", "workers", "stacked", "dense", *ONE_BY_ONE, "cuda", "cuda-loop", "auto")
# Those that can train in several processes (`training.workers`).
SPREAD = ("workers", "dense", *ONE_BY_ONE, "auto")
# The default: the faster of two backends with the same numbers (`engine.choosing.loop_or_workers`).
QUICKER = "loop or workers"
# Those of one process that are not chosen by speed.
ALONE = tuple(name for name in NAMES if name not in ("workers", "auto"))
# Those that train everything that the loop trains, or try a run first. Others are tried on a few
# clients before the run, to refuse it at once.
FIT = ("loop", "workers", QUICKER, "cuda-loop", "auto")
# Those of earlier versions, and what to take instead: they are refused with that advice.
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
