"""Attacks and faults that users can try on their own federation."""
