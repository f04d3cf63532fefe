"""The numbers of one evaluated round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedshift.server.pals import effective_sample_size

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Metrics:
    """What is known after one evaluated round. Accuracies are fractions, losses nats.

    target_*             on test examples that follow T (macro F1: see `Score`)
    estimated_accuracy   sum_y T(y) recall(y) from the clients' validation counts, with its
    estimated_se         standard error
    validation_*         on validation examples that follow T, where there are any
    source_accuracy      on the clients' pooled validation examples: what selection without a
                         target would look at
    """

    round: int
    train_loss: float
    target_accuracy: float
    target_loss: float
    target_macro_f1: float
    estimated_accuracy: float
    estimated_se: float
    validation_accuracy: float
    validation_loss: float
    source_accuracy: float
    clients_trained: int
    ess: float


def ess_of(weights: Floats, sizes: Floats) -> float:
    """The effective sample size of a round's weights [C], in examples; 0 where it has no meaning.

    That is where nobody counts (the round was skipped), and, as the limit of 1 / sum_i a_i^2 / n_i,
    where a client without examples does, as under uniform weights.
    """
    used = weights > 0
    some = bool(used.any()) and bool((sizes[used] > 0).all())
    return effective_sample_size(weights, sizes) if some else 0.0
