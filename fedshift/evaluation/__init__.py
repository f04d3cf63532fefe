"""How models are scored: one shared model, and the clients' own as they serve queries."""
