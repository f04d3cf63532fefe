"""Shortcuts through torch: faster ways to the same numbers, some by private names of torch.

Only this folder uses private or undocumented names of torch. FEDSHIFT_PLAIN=1 turns all shortcuts
off (`torch_private`). The folder knows nothing about clients, models or methods.
"""
