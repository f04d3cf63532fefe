"""Usual mistakes with Flower: refused when a strategy or an app is made."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fedshift import FedAvg, Model
from fedshift.errors import InputError
from fedshift.seeds import Seeds
from support.federations import make_clients

pytest.importorskip("flwr")
from fedshift.flower import AlgorithmStrategy, Site, client_app

METHOD = FedAvg(Model(nn.Linear(8, 5)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": METHOD.model}, "algorithm is a Model; give a method, as FedAvg"),
        ({"clients": 3.0}, "clients must be a whole number, got 3.0; give 3"),
        ({"classes": "5"}, 'classes must be a whole number, got the text "5"; give 5'),
        ({"cohort": True}, "cohort must be a whole number, got True"),
        ({"seeds": 0}, "seeds must be a Seeds, got 0; give Seeds"),
        ({"gate": "drop"}, 'gate must be a Gate, got the text "drop"; give Gate'),
    ],
)
def test_a_strategy_of_no_algorithm_is_refused(given: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"algorithm": METHOD, "clients": 3, "classes": 5, "seeds": Seeds.of(0)}
    assert AlgorithmStrategy(**right).cohort == 3
    with pytest.raises(InputError, match=message):
        AlgorithmStrategy(**(right | given))


def test_a_site_in_the_place_of_a_function() -> None:
    client: Any = make_clients()[0]
    site: Any = Site(METHOD, client)
    with pytest.raises(InputError, match="site is a Site; give a function from the client's"):
        client_app(site)
    with pytest.raises(InputError, match="Site algorithm must be an Algorithm, got a ClientData"):
        Site(client, METHOD)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Site seed must be a whole number, got 0.5"):
        Site(METHOD, client, 0.5)  # type: ignore[arg-type]
