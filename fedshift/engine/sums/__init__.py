"""Sums of a cohort's updates: while they arrive, and where they were trained."""
