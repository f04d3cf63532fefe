"""Clients trained together: which can be, and how."""
