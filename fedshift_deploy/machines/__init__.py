"""Clients as nodes of Flower, simulated or on machines of their own."""
