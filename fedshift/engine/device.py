"""Clients that train on another device, a CUDA GPU: for backends of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedshift.arguments import called
from fedshift.data import ClientData, Plan
from fedshift.engine.backend_checks import check_backend
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, stamp
from fedshift.errors import InputError
from fedshift.tree import Params, Parts


def on(device: str | torch.device, within: Backend) -> Backend:
    """Clients train on `device`, by `within`; what leaves them and what they keep comes back.

        for played in run(algorithm, federation, 10, backend=on("cuda", Stacked())): ...

    Examples stay on the device from their first round on; what the server sends to all is copied
    once a round. Batches are drawn on the processor, so that they are those of every backend, and
    sums are taken there. Raises InputError for a device that torch does not have here, and where
    its memory does not hold the clients' examples and a block's training.
    """
    check_backend(within)
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise InputError(f'device is {called(device)}; give "cuda", or "cpu"') from e
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"there is no device {place} for this torch ({torch.__version__}); install a build for "
            "CUDA, or leave the device out"
        )
    return _Moved(place, within)


@dataclass(eq=False)
class _Moved:
    """The backend that `on` gives, and the examples that are there already."""

    place: torch.device
    within: Backend
    # Keyed by a client's inputs; an entry goes when they are no longer referenced elsewhere.
    _resident: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, repr=False)

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        try:
            for reply in self.within(update, self._sent(jobs)):
                yield _back(reply)
        except torch.OutOfMemoryError as e:
            raise InputError(
                f"the memory of {self.place} is full: {str(e).partition('. ')[0]}. Give stacked "
                "clients less (Stacked(memory=...)), train them one by one, or take a larger device"
            ) from e

    def _sent(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """The jobs there; tensors of messages that many share go there once."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def shared(v: Tensor) -> Tensor:
            # The original is kept beside its copy: while it lives, no other tensor gets its id.
            if id(v) not in copies:
                copies[id(v)] = v, v.to(self.place)
            return copies[id(v)][1]

        for job in jobs:
            # Plans stay drawn on the processor, so that batches are those of every other backend.
            yield job._replace(
                message=_mapped(shared, job.message),
                state=_mapped(lambda v: v.to(self.place), job.state),
                data=self._data(job.data),
                plans={name: _plan(plan, self.place) for name, plan in job.plans.items()},
            )

    def _data(self, data: ClientData) -> ClientData:
        # A user may write into a client's tensors between rounds; then the copy is out of date.
        if data.x not in self._resident or self._resident[data.x][0] != stamp(data):
            # The originals but x, which is the key, are kept: the stamp compares their ids.
            copy = ClientData(*_there(data, self.place))
            self._resident[data.x] = stamp(data), data[1:], copy
        return cast(ClientData, self._resident[data.x][2])


def _there(tensors: Iterable[Tensor], place: torch.device) -> Iterator[Tensor]:
    return (v.to(place) for v in tensors)


def _plan(plan: Plan, place: torch.device) -> Plan:
    rows, weight, lr = _there(plan[:3], place)
    return plan._replace(rows=rows, weight=weight, lr=lr)


def _mapped(f: Callable[[Tensor], Tensor], parts: Mapping[str, Params]) -> Parts:
    return {part: {name: f(v) for name, v in tree.items()} for part, tree in parts.items()}


def _back(reply: Reply) -> Reply:
    return reply._replace(
        update=_mapped(Tensor.cpu, reply.update), changed=_mapped(Tensor.cpu, reply.changed)
    )
