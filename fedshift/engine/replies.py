"""What came back from a cohort: whether every update has the parts and shapes of the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedshift.engine.backends import Reply
from fedshift.errors import TrainingError
from fedshift.model import split_buffers
from fedshift.tree import Parts, flatten


def expected_update(message: Callable[[int], Parts], replies: Sequence[Reply]) -> Parts:
    """What an update must look like: the model that was sent for what mirrors it.

    The model that was sent, not the server's: clients may receive only rows of a layer. For all
    else, the form that most replies have (the first of equals), so that one odd client does not
    make the others look odd. `message` gives what a client was sent.
    """
    usual = _most_usual(replies)
    sent = message(usual.client)
    floats, counters = split_buffers(sent.get("buffers", {}))
    mirrors = {"delta": sent.get("params", {}), "buffers": floats, "counters": counters}
    return {part: mirrors.get(part, tree) for part, tree in usual.update.items()}


def _most_usual(replies: Sequence[Reply]) -> Reply:
    forms = [
        tuple(sorted((k, tuple(v.shape), str(v.dtype)) for k, v in flatten(r.update).items()))
        for r in replies
    ]
    common = Counter(forms).most_common(1)[0][0]
    return replies[forms.index(common)]


def check_replies(message: Callable[[int], Parts], replies: Sequence[Reply]) -> None:
    """Raise TrainingError, naming the client, for the first update that cannot be used."""
    expected = expected_update(message, replies)
    for reply in replies:
        check_reply(reply, expected)


def check_reply(reply: Reply, expected: Parts) -> None:
    """Raise TrainingError, naming the client, for a misshapen or non-finite update.

    What a client keeps must be finite too: a personal model may diverge without a word of it in
    the update, and would be served.
    """
    for part in expected | reply.update:
        ours, theirs = reply.update.get(part), expected.get(part)
        if ours is None or theirs is None or ours.keys() != theirs.keys():
            raise TrainingError(f'client {reply.client} sent an update with a different "{part}"')
        for name, v in ours.items():
            if v.shape != theirs[name].shape or v.dtype != theirs[name].dtype:
                raise TrainingError(
                    f'client {reply.client} sent "{part}/{name}" as {v.dtype} {tuple(v.shape)}, '
                    f"expected {theirs[name].dtype} {tuple(theirs[name].shape)}"
                )
    check_finite(reply)


def check_finite(reply: Reply) -> None:
    """Raise TrainingError for non-finite numbers in what a client sends, or would keep."""
    for name, v in flatten(reply.update).items():
        if not finite(v):
            raise TrainingError(
                f'client {reply.client} sent non-finite numbers in "{name}": its '
                "training diverged. Lower the learning rate, or look at this client's data"
            )
    for name, v in flatten(reply.changed).items():
        if not finite(v):
            raise TrainingError(
                f'client {reply.client} would keep non-finite numbers in "{name}": its own model '
                "diverged. Lower the learning rate, or the strength of what pulls on this model"
            )


def finite(v: Tensor) -> bool:
    """Whether all entries are finite."""
    # NaN and infinity survive a sum, which is several times faster than a look at each entry; a
    # sum of finite numbers may overflow, then each is looked at.
    return math.isfinite(v.sum().item()) or bool(torch.isfinite(v).all())
