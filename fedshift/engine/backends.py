"""What a backend is: a function that trains the clients of a round. And the plainest one, `loop`.

Jobs go in, one per client, and replies come out, in any order. All backends give the same result,
but for rounding where clients are trained together.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.arguments import called
from fedshift.client.local import plan_many
from fedshift.client.trainer import Trainer, trained_by
from fedshift.data import ClientData, Plan
from fedshift.engine.backend_names import IN_PYTHON
from fedshift.errors import InputError, TrainingError, UnfitError, nearest, shown
from fedshift.kernels.torch_private import versions
from fedshift.sketch import sketched
from fedshift.tree import Parts


@sketched
class Job(NamedTuple):
    """One client's work in round t: what it is sent, and what it keeps."""

    client: int
    t: int
    message: Parts
    state: Parts


@sketched
class Reply(NamedTuple):
    """The answer to a job: the update that leaves the client, and what changed of its state.

    t       the round that it answers
    failed  why there is neither; empty if there is
    """

    client: int
    update: Parts = {}  # noqa: RUF012 - never written to
    changed: Parts = {}  # noqa: RUF012
    t: int = 0
    failed: str = ""


@sketched
@dataclass(frozen=True, eq=False)
class Stage:
    """What trains the jobs of a round: the method, what its clients hold, and their batches.

    algorithm  the method of the run; `method` is that of round t
    clients    all clients' examples, by id
    seed       a client's batches depend on (seed, t, client, phase) alone
    drops      whether a client's failure is a reply; it is an error otherwise
    trainer    what trains the phases; None: the plain loop of `Local` (`client.trainer`)
    most       the most steps of a phase, for a trial; None: all
    """

    algorithm: Method
    t: int
    clients: Sequence[ClientData]
    seed: int
    drops: bool = False
    trainer: Trainer | None = None
    most: int | None = None

    @cached_property
    def method(self) -> Method:
        """The method of this round."""
        return self.algorithm.at(self.t)

    def data(self, client: int) -> ClientData:
        """A client's examples."""
        return self.clients[client]

    def plans(self, clients: Sequence[int]) -> list[dict[str, Plan]]:
        """The batches of each of these clients, by phase."""
        pairs = [(i, self.clients[i]) for i in clients]
        drawn = plan_many(self.method.phases(), pairs, self.t, self.seed)
        if self.most is None:
            return drawn
        return [{name: _first(plan, self.most) for name, plan in one.items()} for one in drawn]


def _first(plan: Plan, steps: int) -> Plan:
    sizes = None if plan.sizes is None else plan.sizes[:steps]
    return plan._replace(rows=plan.rows[:steps], weight=plan.weight[:steps], sizes=sizes)


Backend = Callable[[Stage, Iterable[Job]], Iterator[Reply]]


def loop(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
    """Train one client after the other in this process; failures name the client."""
    for job in jobs:
        yield work(stage, job)


def work(stage: Stage, job: Job) -> Reply:
    """Train one client. A failure is an answer where clients may drop out, else TrainingError.

    So is a method that wrote into its arguments: messages are common to all clients, and examples
    to all runs. UnfitError passes as it is: the backend cannot train this run, and no client is to
    blame.
    """
    data, (plans,) = stage.data(job.client), stage.plans((job.client,))
    trees = (tree for parts in (job.message, job.state) for tree in parts.values())
    given = [*data, *(v for tree in trees for v in tree.values())]
    before = versions(given)
    try:
        # Set around the call, not passed through it, so that no method needs to hand it on.
        with contextlib.nullcontext() if stage.trainer is None else trained_by(stage.trainer):
            result = stage.method.client_update(job.message, job.state, data, plans)
    except UnfitError:
        raise
    except (RuntimeError, ValueError, IndexError) as e:
        if "fork-based multiprocessing" in str(e):
            raise UnfitError(
                "workers cannot train: this process took gradients before it forked them, and "
                "torch sees a GPU. Give the workers to `run` as they are, or set "
                "CUDA_VISIBLE_DEVICES= (nothing) for this program, or leave workers out"
            ) from e
        if stage.drops:
            return Reply(job.client, {}, {}, job.t, str(e) or type(e).__name__)
        raise TrainingError(f"client {job.client} failed: {e}") from e
    if (after := versions(given)) != before:
        written = next(v for v, a, b in zip(given, before, after, strict=True) if a != b)
        raise TrainingError(
            f"the method's client_update wrote into {_name(job, data, written)}, which it was given"
            f" (client {job.client}); it must leave its arguments as they are: write into v.clone()"
        )
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TrainingError(
            f"the method's client_update gave {called(result)}; it returns two things: what the "
            "client sends, and the changed parts of its state"
        )
    return Reply(job.client, *result, job.t)


def _name(job: Job, data: ClientData, tensor: Tensor) -> str:
    """What a message calls a tensor that the job was given."""
    names = [f"data.{k}" for k, v in data._asdict().items() if v is tensor]
    for what, parts in (("message", job.message), ("state", job.state)):
        for part, tree in parts.items():
            names += [f'{what}["{part}"]["{k}"]' for k, v in tree.items() if v is tensor]
    return names[0] if names else "a tensor"


def check_backend(backend: object) -> None:
    """Raise InputError unless it is a backend: not a name, a class, or workers without `with`."""
    due = "a backend is a function of (stage, jobs) that yields work(stage, job) for each job"
    if isinstance(backend, str):
        cure = IN_PYTHON.get(backend, f"leave it out, or give one.{nearest(backend, IN_PYTHON)}")
        raise InputError(f'backend is the text "{shown(backend)}"; {cure}')
    if isinstance(backend, type):
        raise InputError(
            f"backend is {called(backend)}; give an object of it, {backend.__name__}()"
        )
    # `workers(...)` is one of these until its `with` block is entered.
    if isinstance(backend, contextlib.ContextDecorator):
        raise InputError(
            "backend is workers(...) outside of a `with` block; write "
            "`with workers(federation.clients, 2) as team:` and give backend=team"
        )
    if getattr(backend, "__name__", "") == "workers":
        raise InputError(f"backend is the function workers; {IN_PYTHON['workers']}")
    if not callable(backend):
        raise InputError(
            f"backend is {called(backend)}; give a backend, such as Stacked(), or leave it out"
        )
    try:
        inspect.signature(backend).bind(None, ())
    except TypeError as e:
        raise InputError(f"backend is {called(backend)}, and {e}; {due}") from e
    except ValueError:  # a function of C has no signature to look at
        return


def ordinary(v: Tensor) -> Tensor:
    """The tensor itself, or a copy of one of inference mode, which could not be written to."""
    return v.clone() if v.is_inference() else v


def stamp(data: ClientData) -> tuple[object, ...]:
    """Cache key: identity and version of each tensor, valid while the tensors are alive.

    Equal only while nothing was written to them. Tensors of inference mode have no version; they
    count as never written to.
    """
    return *map(id, data), *(v or 0 for v in versions(data))
