"""Label shift: clients that differ in P(y) while P(x | y) stays the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import InputError, check_name
from fedshift.shifts.base import (
    Floats,
    Ints,
    Partition,
    check_beta,
    check_count,
    check_inputs,
    deal,
    dirichlet,
    even_sizes,
    largest_multiple,
    round_within,
    shuffled_by_label,
    split_by_owner,
)

Rule = Literal["exact", "fill"]
Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Iid:
    """No shift: a random permutation dealt in turn, sizes differing by at most one.

    n_i = floor(n/M) + [i < n mod M]. Uses every sample. Label marginals differ between clients by
    chance only; nothing is stratified. `InputError`: more clients than samples, bad labels.
    """

    def __call__(
        self, labels: Ints, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition:
        labels = check_inputs(labels, classes, clients, rng)
        # In turn over a random order: sizes differ by at most one.
        owner = np.arange(labels.size) % clients
        return split_by_owner(rng.permutation(labels.size), owner, clients)


@dataclass(frozen=True)
class Sparsity:
    """Every client has C labels, drawn at random, with the same number of samples of each.

    C is `labels_per_client`.

    Client i draws a set Y_i of C labels uniformly without replacement. With n_y samples and m_y
    clients holding label y, n_iy = floor(min_{y: m_y > 0} n_y / m_y) for y in Y_i and 0 elsewhere,
    the largest number that is equal for all (i, y) and shares no sample. So all n_i are equal and
    S_i is uniform on Y_i. The rest of the data stays unused, by design.

    `InputError`: C < 1, C above K or above the number of labels that have samples (labels without
    any are not drawn), or so many clients that n_iy = 0.

    Source: sparsity sampling of the FedPALS paper's experiments, "C labels per client, equal number
    per label, no overlap". The paper gives no count; this is the only reading that satisfies all
    three up to a common factor.
    """

    labels_per_client: int

    def __post_init__(self) -> None:
        check_count("labels_per_client", self.labels_per_client, 1)

    def __call__(
        self, labels: Ints, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition:
        labels = check_inputs(labels, classes, clients, rng)
        supply = np.bincount(labels, minlength=classes)
        sets = draw_label_sets(self.labels_per_client, supply > 0, clients, rng)
        # Labels that no client drew set no limit; any number above all others stands for that.
        holders = sets.sum(axis=0)
        each = np.where(holders > 0, supply // np.maximum(holders, 1), labels.size)
        if each.min() == 0:
            y = int(each.argmin())
            raise InputError(
                f"label {y} is drawn by {holders[y]} of {clients} clients but has {supply[y]} "
                "samples; each holder needs at least one. Ask for fewer clients or fewer "
                f"labels_per_client (given {self.labels_per_client}), or use more data."
            )
        return deal(labels, sets * each.min(), rng)


def draw_label_sets(
    size: int,
    present: NDArray[np.bool_],
    rows: int,
    rng: np.random.Generator,
) -> Ints:
    """Indicator rows [rows, K] in {0, 1} of uniformly drawn sets of `size` labels out of `present`.

    `InputError` when there are fewer than `size` labels to draw from.
    """
    drawable = np.flatnonzero(present)
    if size > drawable.size:
        absent = present.size - drawable.size
        note = f", {absent} of {present.size} classes having no samples" if absent else ""
        raise InputError(
            f"labels_per_client={size}; allowed: 1 to {drawable.size}, the number of labels in "
            f"the data{note}. Lower labels_per_client."
        )
    sets = np.zeros((rows, present.size), np.int64)
    # Each row is `size` ones and zeros in random order: uniform over sets of that size.
    sets[:, drawable] = rng.permuted(np.tile(np.arange(drawable.size) < size, (rows, 1)), axis=1)
    return sets


@dataclass(frozen=True)
class DirichletPerClient:
    """Client i draws a label marginal p_i ~ Dir_K(beta), and its samples follow p_i.

    `rule="exact"` (default): all clients get s = max{s : s * sum_i p_iy <= n_y for all y} samples,
    and n_iy is s * p_iy rounded up or down with n_i = s (`base.round_within`), so the marginals
    are p_i to within 1/s. What does not fit stays unused: a p_i has mass on every label, so the
    first label that runs out stops every client, and no other sizes give the smallest client more
    without changing the p_i. With K = M = 10, equal classes and beta = 0.1, s is about half of n/M.
    A label that is rare in the data keeps s small: prefer "fill" for long-tailed data.

    `rule="fill"`: n_i = floor(n/M) + [i < n mod M] and no sample is lost. All clients draw their
    n_i labels from p_i; a label asked for more often than n_y keeps a random n_y of the requests,
    and the refused ones draw again from p_i restricted to the labels left (from the supply left
    where p_i has no mass there), in at most K passes. Marginals drift towards unpopular labels.

    "exact" is the default because target-aware weights depend on the S_i, and because in it
    clients are exchangeable: a target drawn as the last client follows its p like any other.

    Labels without samples get no mass: p_i is renormalised over the others, which is again
    symmetric Dirichlet. When s < `min_size` all p_i are drawn again, up to 100 times.
    `InputError`: beta outside 1e-6..1e6, `min_size` not reached, more clients than samples.

    Source: the FedPALS paper's "p_i ~ Dir_K(beta)", beta = 0.1 in its Table 1; sizes are not given
    there. Hsu, Qi and Brown (2019, arXiv:1909.06335) instead let clients draw one after another
    with renormalisation, so distortion falls on the last ones; "fill" spreads it over all, and is
    bounded where drawing again until a label is free can loop for ever.
    """

    beta: float
    min_size: int = 1
    rule: Rule = "exact"

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_count("min_size", self.min_size, 1)
        check_name("rule", self.rule, get_args(Rule))

    def __call__(
        self, labels: Ints, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition:
        labels = check_inputs(labels, classes, clients, rng, self.min_size)
        supply = np.bincount(labels, minlength=classes)
        if self.rule == "fill":
            p = self._draw(supply, clients, rng)
            return deal(labels, fill(p, supply, even_sizes(labels.size, clients), rng), rng)

        def draw() -> tuple[int, Floats]:
            # The size follows from the marginals, so it is part of what is drawn again.
            p = self._draw(supply, clients, rng)
            return largest_multiple(supply, p.sum(axis=0))[0], p

        do = 'Lower min_size or clients, raise beta, or use rule="fill".'
        size, p = _draw_until(self.min_size, draw, clients * classes, do)
        return deal(labels, round_within(size * p, supply), rng)

    def _draw(self, supply: Ints, clients: int, rng: np.random.Generator) -> Floats:
        # All K entries are drawn even where labels are absent: the stream is then the same.
        p = dirichlet(self.beta, supply.size, clients, rng) * (supply > 0)
        return _normalised(p, (supply > 0).astype(np.float64))


def fill(p: Floats, supply: Ints, sizes: Ints, rng: np.random.Generator) -> Ints:
    """Label table [M, K] drawn from p, row sums `sizes`, column sums `supply` (both add up to n).

    See `DirichletPerClient`, rule "fill". A pass that refuses a request exhausts a label, and with
    one label left all requests fit, so the passes end.
    """
    counts = np.zeros(p.shape, np.int64)
    supply_left, need = supply.copy(), sizes.copy()
    while need.any():
        requests = rng.multinomial(
            need, _normalised(p * (supply_left > 0), supply_left.astype(np.float64))
        )
        for y in np.flatnonzero(requests.sum(axis=0) > supply_left):
            # Which requests are refused is drawn fairly: none depends on the order of clients.
            requests[:, y] = rng.multivariate_hypergeometric(requests[:, y], supply_left[y])
        counts += requests
        supply_left -= requests.sum(axis=0)
        need -= requests.sum(axis=1)
    return counts


@dataclass(frozen=True)
class DirichletPerClass:
    """Each class is cut among the clients in proportions q_y ~ Dir_M(beta).

    n_iy = floor(n_y Q_iy) - floor(n_y Q_{i-1,y}) with Q_iy = sum_{j <= i} q_yj. Every sample is
    used; sizes are unequal. With `capacity`, classes are dealt in order 0..K-1 and q_yi is set to 0
    (and q_y renormalised) for a client that already holds n/M samples; if no mass is left, the
    clients below n/M share equally. When a client has fewer than `min_size` samples all q_y are
    drawn again, up to 100 times, then `InputError`; also for beta outside 1e-6..1e6.

    Source: Yurochkin et al. (2019, arXiv:1905.12022), section 4: the default. Their code, and
    NIID-Bench (Li et al. 2022, arXiv:2102.02079) and FedLab after it, are `capacity=True,
    min_size=10` (FedLab: K, as in FedDRM's "Dir-0.3"); they draw again without limit, divide 0 by 0
    where no mass is left, and by rounding may give a sample to a last client that is full.
    """

    beta: float
    min_size: int = 1
    capacity: bool = False

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_count("min_size", self.min_size, 0)

    def __call__(
        self, labels: Ints, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition:
        labels = check_inputs(labels, classes, clients, rng, self.min_size)
        supply = np.bincount(labels, minlength=classes)
        table = cut_with_capacity if self.capacity else cut

        def draw() -> tuple[int, Ints]:
            counts = table(dirichlet(self.beta, clients, classes, rng), supply)
            return int(counts.sum(axis=1).min()), counts

        do = f"Lower min_size or clients, or raise beta (given {self.beta:g})."
        _, counts = _draw_until(self.min_size, draw, clients * classes, do)
        return deal(labels, counts, rng)


def cut(q: Floats, supply: Ints) -> Ints:
    """Cut n_y at the cumulated proportions: q [K, M], supply [K] to a label table [M, K]."""
    cumulated = np.cumsum(q, axis=1)
    # Dividing by the last entry makes it exactly 1, so that the row's last client with any mass
    # closes the row and one whose mass is 0 gets nothing, whatever the rounding.
    cuts = np.floor(cumulated / cumulated[:, -1:] * supply[:, None]).astype(np.int64)
    # Differences of cumulated counts: they add up to n_y whatever the rounding.
    return np.diff(cuts, axis=1, prepend=0).T


def cut_with_capacity(q: Floats, supply: Ints) -> Ints:
    """As `cut`, label by label; a client that has its n / M examples gets no more of the next."""
    clients = q.shape[1]
    counts = np.zeros((clients, supply.size), np.int64)
    sizes = np.zeros(clients, np.int64)
    for y in np.flatnonzero(supply):
        # n_i < n / M without division, so that nothing is rounded.
        below = (sizes * clients < supply.sum()).astype(np.float64)
        counts[:, y] = cut(_normalised(q[y : y + 1] * below, below), supply[y : y + 1])[:, 0]
        sizes += counts[:, y]
    return counts


@dataclass(frozen=True)
class Shards:
    """Sort by label, cut into M * s shards, deal s shards to each client at random.

    s is `per_client`.

    Shard j holds floor(n/(M s)) + [j < n mod (M s)] samples, so every sample is used and the sizes
    of two clients differ by at most s. A shard holds one label plus one for each border between
    labels inside it, so at most M s + K - 1 entries of the label table are not zero.
    `InputError`: s < 1, or more shards than samples.

    Source: McMahan et al. (2017, arXiv:1602.05629), section 3, with M = 100, s = 2 on MNIST. There
    n is a multiple of M s; within a label, ours are in random order, not the file's.
    """

    per_client: int = 2

    def __post_init__(self) -> None:
        check_count("per_client", self.per_client, 1)

    def __call__(
        self, labels: Ints, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition:
        labels = check_inputs(labels, classes, clients, rng)
        shards = clients * self.per_client
        if shards > labels.size:
            raise InputError(
                f"per_client={self.per_client} for {clients} clients makes {shards} shards of "
                f"{labels.size} samples; allowed: per_client up to {labels.size // clients}."
            )
        # Each client occurs `per_client` times among the shards, in random places.
        owner_of_shard = rng.permutation(shards) % clients
        owner = np.repeat(owner_of_shard, even_sizes(labels.size, shards))
        return split_by_owner(shuffled_by_label(labels, rng), owner, clients)


def _normalised(mass: Floats, otherwise: Floats) -> Floats:
    """Rows scaled to sum 1; a row without mass becomes `otherwise` [K], scaled."""
    total = mass.sum(axis=1, keepdims=True)
    rows = np.where(total > 0, mass, otherwise)
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


def _draw_until(
    min_size: int, draw: Callable[[], tuple[int, Drawn]], cells: int, do: str
) -> tuple[int, Drawn]:
    """The first of up to 100 draws whose smallest client reaches `min_size`, else `InputError`.

    Fewer tries (never below 10) when M * K `cells` are many, to stay within a second.
    """
    tries, best = int(np.clip(1_000_000 // cells, 10, 100)), 0
    for _ in range(tries):
        smallest, drawn = draw()
        if smallest >= min_size:
            return smallest, drawn
        best = max(best, smallest)
    raise InputError(
        f"min_size={min_size} not reached: in the best of {tries} draws the smallest client had "
        f"{best} samples. {do}"
    )
