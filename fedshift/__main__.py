"""`python -m fedshift`: the command line."""

from __future__ import annotations

from fedshift.cli import main

if __name__ == "__main__":
    main()
