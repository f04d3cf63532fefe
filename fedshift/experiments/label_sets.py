"""What a run says of its label sets: who holds a label, which were absent, how tuning went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedshift.algorithms.base import Algorithm, Capabilities, ask
from fedshift.engine.run import Round
from fedshift.tree import Parts


@dataclass(frozen=True)
class SetRound:
    """Label sets after one evaluated round; None for what the method does not have.

    absent          labels that nobody of this round's cohort held
    loss_*          central tuning's loss before and after its steps
    outside_*       mean mass that the model then gives to the absent labels, on the server's inputs
    """

    round: int
    absent: int
    loss_before: float | None = None
    loss_after: float | None = None
    outside_before: float | None = None
    outside_after: float | None = None


def set_round(current: Round) -> tuple[SetRound, ...]:
    """What the server knows after a round; () for a method without label sets."""
    server = current.server
    if "absent" not in server:
        return ()
    absent = int(server["absent"]["now"].sum())
    if "tuning" not in server:
        return (SetRound(current.t, absent),)
    loss, outside = server["tuning"]["loss"].tolist(), server["tuning"]["outside"].tolist()
    return (SetRound(current.t, absent, *loss, *outside),)


def final_values(rounds: Sequence[SetRound]) -> dict[str, float | None]:
    """The last evaluated round's values under the names that a summary's "final" has."""
    if not rounds:
        return {}
    last = asdict(rounds[-1])
    last.pop("round")
    return {f"sets_{name}": value for name, value in last.items()}


def described(
    algorithm: Algorithm, server: Parts, rounds: Sequence[SetRound]
) -> dict[str, Any] | None:
    """The summary's "label_sets"; None for a method without.

    mode, tune, tune_over: the method's; tune is "none" without steps, tune_over then None.
    holders [K]: clients that hold each label. absent_rounds [K]: in how many rounds nobody of the
    cohort held it. rounds: one `SetRound` per evaluated round.
    """
    if not rounds:
        return None
    rules = ask(algorithm, Capabilities.label_rules)
    return {
        **(rules or {"mode": None, "tune": "none", "tune_over": None}),
        "holders": server["sets"]["held"].sum(0).tolist(),
        "absent_rounds": server["absent"]["rounds"].tolist(),
        "rounds": [asdict(one) for one in rounds],
    }


def sentences(found: dict[str, Any], classes: Sequence[str]) -> list[str]:
    """What to know about them: labels of nobody, labels absent at times, and where mass went."""
    last, said = found["rounds"][-1], []
    nobody = [c for c, n in zip(classes, found["holders"], strict=True) if not n]
    if nobody:
        said.append(f"No client holds {_named(nobody)}: {_unheld(found)}.")
    at_times = [
        f'"{c}" ({n})'
        for c, n, holders in zip(classes, found["absent_rounds"], found["holders"], strict=True)
        if n and holders
    ]
    if at_times:
        said.append(
            f"Rounds of {last['round']} in which nobody of the cohort held a label: "
            f"{', '.join(at_times)}."
        )
    if last["outside_after"] is not None and last["absent"]:
        said.append(
            f"In the last round central tuning moved the mass on the {last['absent']} absent "
            f"label{'s' * (last['absent'] > 1)} from {last['outside_before']:.1%} to "
            f"{last['outside_after']:.1%}."
        )
    return said


def _unheld(found: dict[str, Any]) -> str:
    """What becomes of the rows of labels that nobody holds."""
    movers = []
    if found["mode"] == "public":
        movers.append('every client\'s softmax is over all labels (mode = "public")')
    if found["tune_over"] == "all":
        movers.append('central tuning moves all rows (tune_over = "all")')
    if not movers:
        return "the rows of the head stay as they began"
    return f"no example trains them, yet the rows of the head move, as {' and '.join(movers)}"


def _named(classes: Sequence[str]) -> str:
    return ", ".join(f'"{c}"' for c in classes)
