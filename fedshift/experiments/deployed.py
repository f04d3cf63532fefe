"""Moved to `fedshift.experiments.machines.deployed`: apps of federations made before name it so."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.experiments.machines.deployed")
