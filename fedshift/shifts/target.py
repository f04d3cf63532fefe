"""The target's label marginal: drawing one, and resampling data to it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedshift.errors import InputError
from fedshift.shifts.base import (
    Floats,
    Ints,
    as_numbers,
    check_beta,
    check_count,
    check_pool,
    deal,
    dirichlet,
    largest_multiple,
    largest_remainder,
)
from fedshift.shifts.label import draw_label_sets


def sparse_marginal(classes: int, labels_per_client: int, rng: np.random.Generator) -> Floats:
    """Uniform on C labels drawn without replacement: T_y = 1/C on them, else 0; float64 [K].

    The marginal of a client of `Sparsity(C)`. `InputError`: C < 1 or C > K.
    """
    check_count("classes", classes, 1)
    check_count("labels_per_client", labels_per_client, 1)
    # Drawn as a client's labels are, so that a target can be one more client.
    chosen = draw_label_sets(labels_per_client, np.ones(classes, np.bool_), 1, rng)
    return np.asarray(chosen[0] / float(labels_per_client), dtype=np.float64)


def dirichlet_marginal(classes: int, beta: float, rng: np.random.Generator) -> Floats:
    """T ~ Dir_K(beta), float64 [K], the marginal of a client of `DirichletPerClient(beta)`.

    `InputError`: beta outside 1e-6..1e6.
    """
    check_count("classes", classes, 1)
    return dirichlet(check_beta(beta), classes, 1, rng).reshape(classes)


def check_marginal(marginal: ArrayLike, classes: int, name: str = "marginal") -> Floats:
    """`marginal` as float64 [K] when its entries are finite, >= 0 and sum to 1 within 1e-6.

    The result sums to 1 to the last bits. Anything else is an `InputError` about `name`.
    """
    values = as_numbers(name, marginal)
    if values.shape != (classes,):
        what = f"{len(values)} numbers" if values.ndim == 1 else f"the shape {values.shape}"
        raise InputError(f"{name} has {what}; allowed: one for each of {classes} classes.")
    bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if bad.size:
        raise InputError(
            f"{name}[{bad[0]}]={values[bad[0]]:g}; allowed: finite numbers >= 0 that sum to 1."
        )
    total = float(values.sum())
    if abs(total - 1) > 1e-6:
        raise InputError(
            f"{name} sums to {total:.6g}; allowed: 1 within 1e-6. Divide counts by their sum."
        )
    # Within 1e-6 is enough for users; sums of many shares must not be off by as much.
    return np.asarray(values / total)


def resample_to(
    labels: ArrayLike,
    marginal: ArrayLike,
    classes: int,
    rng: np.random.Generator,
    size: int | None = None,
) -> Ints:
    """Indices of samples drawn without replacement so that their label marginal is T = `marginal`.

    Counts are size * T rounded by largest remainders, so each is within 1 of size * T_y. By default
    size = floor(min_{y: T_y > 0} n_y / T_y), the largest with size * T_y <= n_y for every label.
    `labels` [n], `marginal` [K]; the result is int64 [size], ascending.

    >>> import numpy as np
    >>> from fedshift.shifts import resample_to
    >>> labels = np.array([0, 0, 0, 0, 1, 1])
    >>> labels[resample_to(labels, [0.5, 0.5], 2, np.random.default_rng(0))].tolist()
    [0, 0, 1, 1]

    `InputError`: T is not a distribution over K labels; a label with mass has no samples; `size`
    below 1 or above the largest.

    Source: the FedPALS paper resamples validation data to T; size and rounding are not given there.
    """
    pool = check_pool(labels, classes, rng)
    target = check_marginal(marginal, classes)
    supply = np.bincount(pool, minlength=classes)
    missing = np.flatnonzero((target > 0) & (supply == 0))
    if missing.size:
        raise InputError(
            f"marginal[{missing[0]}]={target[missing[0]]:.3g} but there are no samples of label "
            f"{missing[0]}. Set its mass to 0 and renormalise, or add samples of it."
        )
    # Without replacement the label that runs out first decides.
    largest, scarce = largest_multiple(supply, target)
    if size is None:
        size = largest
    why = f"Label {scarce} has {supply[scarce]} samples for a mass of {target[scarce]:.3g}."
    check_count("size", size, 1, largest, why)
    return deal(pool, largest_remainder(size * target)[None], rng)[0]
