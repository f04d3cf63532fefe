"""The cap of a federation: chosen where an experiment names none."""

from __future__ import annotations

from fedshift.experiments.config import Config

# A client may count as much as this many average ones, and never more than all others together.
AVERAGE, HALF = 3.0, 0.5


def cap_named(config: Config) -> float | None:
    """The largest weight that the experiment itself allows a client; None where it does not say."""
    given = (config.method.options.get("cap"), config.training.max_weight)
    numbers = [float(cap) for cap in given if cap is not None]
    return min(numbers) if numbers else None


def with_cap(config: Config) -> tuple[Config, str]:
    """The experiment with a cap in training.max_weight, and a sentence that says which and why.

    Of C clients in a round: min(1/2, 3/C), at least 1/C. An experiment that names its own keeps it.
    """
    named = cap_named(config)
    if named is not None:
        return config, f"No client gets a weight above {named:.3g}, as the experiment says."
    clients = min(config.training.cohort or config.clients, config.clients)
    cap = max(1.0 / clients, min(HALF, AVERAGE / clients))
    training = config.training.model_copy(update={"max_weight": cap})
    return config.model_copy(update={"training": training}), (
        f"No client gets a weight above {cap:.3g} of 1, whatever it claims: training.max_weight in "
        f"experiment.toml, chosen for {clients} clients in a round (as much as three average ones, "
        "at most as much as all others together). Set it there, to 1 for no limit."
    )
