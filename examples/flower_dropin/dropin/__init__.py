"""A Flower app whose strategy can be FedPALS."""
