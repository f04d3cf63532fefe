"""Clients that keep rows and models on machines of their own: the server's questions to them."""
