"""Figures for which nothing is trained: pictures of clients' data, and gradients of two heads."""
