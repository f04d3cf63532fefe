"""Reproducing printed tables: planning a table's runs, training them, and comparing the results."""
