"""`fit`, `compare` and `load`: training on a `Task` in one call, and its result.

`planning` makes an ordinary experiment of what is given, `result` has what came of it.
"""
