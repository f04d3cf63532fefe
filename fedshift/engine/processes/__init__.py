"""Clients trained in other processes of this machine."""
