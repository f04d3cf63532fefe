"""The papers' experiments beside their printed numbers. Nothing of the core imports this."""
