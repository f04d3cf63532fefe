"""The experiment file: its keys, what it names, and its mistakes by line."""
