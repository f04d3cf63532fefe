"""Data sets that only the papers' experiments use; `catalogue` adds them to the known ones."""
