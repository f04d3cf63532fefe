"""Train clients on another device, a CUDA GPU, by any backend of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedshift.arguments import called
from fedshift.data import ClientData, Plan
from fedshift.engine.backends import Backend, Job, Reply, Stage, check_backend, stamp
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
    return _Moved(place, within)


@dataclass(eq=False)
class _Moved:
    """The backend that `on` gives, with the examples that are on the device already."""

    place: torch.device
    within: Backend
    # By a client's inputs. The keys are weak: an entry goes when nothing else refers to the inputs.
    _resident: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, repr=False)

    def __call__(self, stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        moved = _There(**{one.name: getattr(stage, one.name) for one in fields(stage)}, moved=self)
        try:
            for reply in self.within(moved, self._sent(jobs)):
                update, changed = (
                    _mapped(Tensor.cpu, parts) for parts in (reply.update, reply.changed)
                )
                yield reply._replace(update=update, changed=changed)
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
            state = _mapped(lambda v: v.to(self.place), job.state)
            yield job._replace(message=_mapped(shared, job.message), state=state)

    def data(self, data: ClientData) -> ClientData:
        """The examples on the device."""
        # A user may write into a client's tensors between rounds: then the copy is out of date.
        if data.x not in self._resident or self._resident[data.x][0] != stamp(data):
            # The stamp compares ids, so the other originals must live as long as the entry. Not x:
            # it is the key, and a reference to it would keep the entry for ever.
            copy = ClientData(*(v.to(self.place) for v in data))
            self._resident[data.x] = stamp(data), data[1:], copy
        return cast(ClientData, self._resident[data.x][2])


@dataclass(frozen=True, eq=False)
class _There(Stage):
    """A stage whose examples and batches are on the device."""

    moved: _Moved = field(kw_only=True)

    def data(self, client: int) -> ClientData:
        return self.moved.data(self.clients[client])

    def plans(self, clients: Sequence[int]) -> list[dict[str, Plan]]:
        # Drawn on the processor: a GPU's generator would draw other batches.
        return [{k: self._plan(p) for k, p in one.items()} for one in super().plans(clients)]

    def _plan(self, plan: Plan) -> Plan:
        rows, weight, lr = (v.to(self.moved.place) for v in plan[:3])
        return plan._replace(rows=rows, weight=weight, lr=lr)


def _mapped(f: Callable[[Tensor], Tensor], parts: Mapping[str, Params]) -> Parts:
    return {part: {name: f(v) for name, v in tree.items()} for part, tree in parts.items()}
