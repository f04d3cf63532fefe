"""Shortcuts through torch: its private names, and faster ways to the same numbers.

Nothing outside of this folder uses a private or undocumented name of torch. FEDSHIFT_PLAIN=1 turns
all shortcuts off (`torch_private`). The folder knows nothing of clients, models or methods.
"""
