"""The command line."""

from __future__ import annotations

from fedshift.cli.loading import loading

__all__ = ["main"]


def main() -> None:
    """Entry point of the script; what it needs is loaded inside, where Ctrl-C is answered."""
    with loading():
        from fedshift.cli.app import main as run
    run()
