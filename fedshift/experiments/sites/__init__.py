"""Clients on machines of their own that keep their rows and models: what they are asked."""
