"""Data sets that only the papers use; `catalogue` adds them to the known ones."""
