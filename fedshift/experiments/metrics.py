"""The numbers of one evaluated round."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Metrics:
    """What is known after one evaluated round. Accuracies are fractions, losses nats.

    target_*             on test examples that follow T (macro F1: see `Score`)
    estimated_accuracy   sum_y T(y) recall(y) from the clients' validation counts, with its
    estimated_se         standard error
    validation_*         on validation examples that follow T, where there are any
    source_accuracy      on the clients' pooled validation examples: what selection without a
                         target would look at
    ess, ess_fraction    of the round's weights, in examples and as a share of its cohort's
    gap                  ||T - S^T a||_2 of the round's weights
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
    # After the others: rows that earlier versions kept have none.
    ess_fraction: float = math.nan
    gap: float = math.nan
