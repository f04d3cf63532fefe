"""A method is a function from a Setting to an algorithm; keyword-only arguments are its options."""

from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.objectives import CrossEntropy, Proximal
from fedshift.recipes import Setting
from fedshift.server.combine import Mean
from fedshift.server.weights import Pals


def towards_target(setting: Setting, *, ess: float = 0.5, mu: float = 0.0) -> FedAvg:
    """FedPALS' weights with FedProx's term."""
    return FedAvg(
        setting.model,
        objective=CrossEntropy() + Proximal(mu) if mu else CrossEntropy(),
        local=setting.local,
        combine=Mean(Pals(setting.target, ess=ess)),
        server=setting.server,
    )
