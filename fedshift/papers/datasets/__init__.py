"""Data sets that only the papers use; `catalogue` adds them to those that are known."""
