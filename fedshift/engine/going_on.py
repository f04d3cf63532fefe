"""Whether a run can go on after a round that is given: it may be another method's or network's."""

from __future__ import annotations

from fedshift.arguments import called
from fedshift.engine.one_round import Round
from fedshift.errors import InputError


def check_after(after: Round, first: Round, clients: int, rounds: int) -> None:
    """Raise InputError unless `after` is a round of a run like the one whose round 0 is `first`.

    The parts of the server's state are the same in all rounds, and so are the model's names and
    shapes.
    """
    own = "give a Round of a run of this method on this federation, or leave after out"
    for name, kind in (("server", after.server), ("states", after.states)):
        if not hasattr(kind, "keys"):
            raise InputError(f"after.{name} is {called(kind)}, no dictionary; {own}")
    if after.t > rounds:
        raise InputError(
            f"after is round {after.t}, and rounds={rounds} counts from round 1 on; give more than "
            f"{after.t} to go on"
        )
    if lacking := sorted(first.server.keys() - after.server.keys()):
        raise InputError(f'after has no "{lacking[0]}", which this method keeps; {own}')
    for part in ("params", "buffers"):
        due, given = first.server.get(part, {}), after.server.get(part, {})
        odd = list(due.keys() ^ given.keys())
        odd += [k for k in due.keys() & given.keys() if due[k].shape != given[k].shape]
        if odd:
            raise InputError(f'after has other {part} than this network, as "{min(odd)}"; {own}')
    if others := [client for client in after.states if not 0 <= client < clients]:
        raise InputError(f"after has the state of client {others[0]} of {clients} clients; {own}")
