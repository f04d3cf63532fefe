"""Attacks and faults that users can try on their federation before others do."""
