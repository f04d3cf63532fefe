"""The command line."""

from __future__ import annotations

from fedshift.cli.loading import loading

__all__ = ["main"]


def main() -> None:
    """Entry point of the script. It imports inside `loading`, so that Ctrl-C ends it cleanly."""
    with loading():
        from fedshift.cli.app import main as run
    run()
