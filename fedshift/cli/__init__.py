"""The command line."""

from fedshift.cli.app import main

__all__ = ["main"]
