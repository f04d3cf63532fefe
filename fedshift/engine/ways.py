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
