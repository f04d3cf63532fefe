"""One file per paper: its protocols and printed numbers as data."""
