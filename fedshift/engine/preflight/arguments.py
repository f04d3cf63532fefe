"""The arguments of `run`: what they are, and whether they fit together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from fedshift.algorithms.method import check_method
from fedshift.arguments import called, check_kind, check_whole
from fedshift.data import Surveyed
from fedshift.engine.backends import check_backend
from fedshift.engine.checks.gate import Gate
from fedshift.engine.federation import TABLE, Federation
from fedshift.engine.round import Round
from fedshift.errors import InputError, nearest, shown
from fedshift.model import Model
from fedshift.randomness import one_at_a_time
from fedshift.tree import Parts


def check_sizes(federation: Federation) -> None:
    """Raise InputError if the table's sizes are not those of the clients."""
    table, clients = federation.table, federation.clients
    # Clients made on demand are checked when they are made; counting here would make them all.
    if isinstance(clients, Surveyed):
        return
    for i, c in enumerate(clients):
        size = int((c.w != 0).sum())
        if float(table["n"][i]) != size:
            raise InputError(
                f'client {i} has {size} examples, and the table\'s "n" says '
                f"{float(table['n'][i]):g}: it is the table of other clients; {TABLE}"
            )


def check_run(
    algorithm: object, rounds: object, cohort: object, backend: object, after: object, kind: type
) -> None:
    """Raise InputError for arguments of a run of the wrong type or range; kind: that of `after`."""
    check_method(algorithm)
    check_whole("rounds", rounds)
    if isinstance(rounds, int) and rounds < 0:
        raise InputError(f"rounds must be 0 or more, got {rounds}")
    if cohort is not None:
        check_whole("cohort", cohort)
    check_backend(backend)
    if after is not None:
        check_kind("after", after, kind, "give a Round, as `run` yields them")


def check_after(
    after: Round, first: Round, clients: int, rounds: int, first_state: Callable[[int], Parts]
) -> None:
    """Raise InputError unless a run whose round 0 is `first` can go on from `after`.

    In all rounds of a run, the server's state has the same parts, and the model the same names and
    shapes. A client that has taken part has a state with the parts of its `first_state`.
    """
    advice = "give a Round of a run of this method on this federation, or leave after out"
    for name, kind in (("server", after.server), ("states", after.states)):
        if not hasattr(kind, "keys"):
            raise InputError(f"after.{name} is {called(kind)}, no dictionary; {advice}")
    if after.t > rounds:
        raise InputError(
            f"after is round {after.t}, and rounds={rounds} counts from round 1 on; give more than "
            f"{after.t} to go on"
        )
    if lacking := sorted(first.server.keys() - after.server.keys()):
        raise InputError(f'after has no "{lacking[0]}", which this method keeps; {advice}')
    for part in ("params", "buffers"):
        due, given = first.server.get(part, {}), after.server.get(part, {})
        odd = list(due.keys() ^ given.keys())
        odd += [k for k in due.keys() & given.keys() if due[k].shape != given[k].shape]
        if odd:
            raise InputError(f'after has other {part} than this network, as "{min(odd)}"; {advice}')
    if others := [client for client in after.states if not 0 <= client < clients]:
        raise InputError(
            f"after has the state of client {others[0]} of {clients} clients; {advice}"
        )
    client = next(iter(after.states), None)
    if client is not None and (
        lacking := sorted(set(first_state(client)) - after.states[client].keys())
    ):
        raise InputError(
            f'after.states[{client}] has no "{lacking[0]}", which this method keeps on its '
            f"clients; {advice}"
        )


def check_gate(gate: Gate, size: int) -> None:
    """Raise InputError if the gate asks for more clients than a round has: all would be skipped."""
    if gate.min_clients > size:
        raise InputError(
            f"Gate min_clients is {gate.min_clients}, and a round has {size} clients, so that all "
            f"would be skipped; give at most {size}"
        )


def check_first_model(model: Model, federation: Federation) -> None:
    """Raise InputError unless the first model has the network's names, shapes, kinds and device.

    Its type may differ within a kind (real, complex, integer): a float64 model of a float32 network
    computes in float64.
    """
    params, buffers = federation.params, federation.buffers
    with one_at_a_time():
        expected = (
            dict[str, Tensor](model.net.named_parameters()),
            dict[str, Tensor](model.net.named_buffers()),
        )
    for what, given, tree in zip(("params", "buffers"), (params, buffers), expected, strict=True):
        _check_names(what, given, tree)
        for name, v in given.items():
            _check_like(f'{what}["{name}"]', v, tree[name])
    tensors = (federation.clients[0].x, *params.values(), *buffers.values())
    places = sorted({str(v.device) for v in tensors})
    if len(places) > 1:
        raise InputError(
            f"clients, params and buffers lie on {' and '.join(places)}; have all on one device, "
            "as v.cpu() does, and let a backend move them: on(device, backend)"
        )


def _check_names(what: str, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    unknown = [name for name in given if name not in expected]
    missing = [name for name in expected if name not in given]
    if unknown:
        raise InputError(
            f'{what} has "{shown(unknown[0])}", which the network has not.'
            f"{nearest(unknown[0], expected)} Give *model.init(), or a model trained with this "
            "network"
        )
    if missing:
        names = ", ".join(f'"{name}"' for name in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            f"{what} lacks the network's {names}{more}; give *model.init(), or a model trained "
            "with this network"
        )


def _check_like(what: str, given: Tensor, base: Tensor) -> None:
    if given.shape != base.shape:
        raise InputError(
            f"{what} has the shape {tuple(given.shape)}, the network's has {tuple(base.shape)}; "
            "give *model.init(), or a model trained with this network"
        )
    if (given.is_floating_point(), given.is_complex()) != (
        base.is_floating_point(),
        base.is_complex(),
    ):
        raise InputError(
            f"{what} is {given.dtype}, the network's is {base.dtype}; give {what}.to({base.dtype})"
        )
