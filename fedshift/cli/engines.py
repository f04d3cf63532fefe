"""`--engine`, `--backend` and `--workers`: where and how a run's clients work."""

from __future__ import annotations

import os

from fedshift.cli.console import tell
from fedshift.errors import InputError
from fedshift.experiments.experiment import Engine, in_process


def engine_of(
    name: str, actors: int | None, workers: int | None = None, backend: str | None = None
) -> Engine:
    """The engine of this name. Raises InputError for options of another one."""
    if name == "flower-sim":
        from fedshift.experiments.on_flower import flower_simulation

        if workers is not None:
            raise InputError("--workers is for the engine in-process; Flower's are --actors")
        if backend is not None:
            raise InputError("--backend is for the engine in-process; leave it out")
        return flower_simulation(actors)
    if actors is not None:
        raise InputError("--actors is for --engine flower-sim; leave it out, or choose that engine")
    if workers is None and backend is None:
        return in_process
    from fedshift.experiments.side_by_side import backend_of

    if backend is None or not backend.startswith(("auto", "cuda")):
        # Where torch sees a GPU, no forked process can train once this one has (`check_forked`).
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return backend_of(backend or "workers", workers, tell)
