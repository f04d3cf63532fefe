"""What clients measure on their validation examples: sums as a message's record, and back."""

from __future__ import annotations

import math

import torch
from flwr.app import MetricRecord, RecordDict
from torch import Tensor

from fedshift.errors import InputError
from fedshift.evaluation.scores import Score
from fedshift.flower.records import fields_of

COUNTS = ("correct", "total", "predicted")


def to_sums(score: Score) -> RecordDict:
    """A client's answer: three counts per label and the summed loss, and no example."""
    counts = {name: getattr(score, name).tolist() for name in COUNTS}
    return RecordDict({"score": MetricRecord({**counts, "loss_sum": score.loss_sum})})


def to_score(content: RecordDict, classes: int) -> Score:
    """The inverse of `to_sums`. Raises InputError for what no examples can give."""
    fields = fields_of(content, "score")

    def counts(name: str) -> Tensor:
        return torch.tensor(fields[name], dtype=torch.int64).reshape(classes)

    right, total, given = (counts(name) for name in COUNTS)
    score = Score(right, total, given, float(fields["loss_sum"]))
    # One client's impossible counts must not spoil the accuracy over all.
    possible = bool((right >= 0).all() and (right <= total).all() and (right <= given).all())
    if not possible or int(given.sum()) != score.n or not 0 <= score.loss_sum < math.inf:
        raise InputError(
            "its counts are none: of some label there is more right than there are, or than were "
            "predicted"
        )
    return score
