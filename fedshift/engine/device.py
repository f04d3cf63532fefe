"""Train clients on another device, a CUDA GPU, by any backend of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedshift.arguments import called
from fedshift.data import ClientData, Plan
from fedshift.engine.backend_checks import check_backend, watched
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, stamp
from fedshift.errors import InputError
from fedshift.tree import Params, Parts


def on(device: str | torch.device, within: Backend) -> Backend:
    """A backend that trains clients on `device`, by the backend `within`.

        for played in run(algorithm, federation, 10, backend=on("cuda", Stacked())): ...

    Updates and states come back to the processor, where sums are taken. Examples stay on the device
    from a client's first round on; what the server sends to all is copied once a round. Batches are
    drawn on the processor, so that they are those of every backend. Raises InputError for a device
    that torch does not have here, and if its memory is too small for the clients' examples and the
    training of a block.
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
    # Watched here, since the backend that goes round a user's is the library's.
    return _Moved(place, watched(within, None))


@dataclass(eq=False)
class _Moved:
    """The backend that `on` gives, with the examples that are on the device already."""

    place: torch.device
    within: Backend
    # By a client's inputs. The keys are weak: an entry goes when nothing else refers to the inputs.
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
        """The jobs on the device; a tensor that many messages share is copied once."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def shared(v: Tensor) -> Tensor:
            # The original is kept beside its copy: while it lives, Python gives its id to no other.
            if id(v) not in copies:
                copies[id(v)] = v, v.to(self.place)
            return copies[id(v)][1]

        for job in jobs:
            # Plans were drawn on the processor: a GPU's generator would draw other batches.
            yield job._replace(
                message=_mapped(shared, job.message),
                state=_mapped(lambda v: v.to(self.place), job.state),
                data=self._data(job.data),
                plans={name: _plan(plan, self.place) for name, plan in job.plans.items()},
            )

    def _data(self, data: ClientData) -> ClientData:
        # A user may write into a client's tensors between rounds: then the copy is out of date.
        if data.x not in self._resident or self._resident[data.x][0] != stamp(data):
            # The stamp compares ids, so the other originals must live as long as the entry. Not x:
            # it is the key, and a reference to it would keep the entry for ever.
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
