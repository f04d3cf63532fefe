"""Trials that choose a backend for a run by its speed."""
