"""Figures without training runs: pictures of clients' data, of weights, and of gradients."""
