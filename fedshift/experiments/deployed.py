"""Moved to `fedshift.experiments.machines.deployed`: apps of federations made before name it so."""

from fedshift.moved import replaced

# Flower looks for these in the file's text, before it imports it.
__all__ = ["client_app", "server_app"]  # noqa: F822
replaced(__name__, "fedshift.experiments.machines.deployed")
