"""`fit`, `compare` and `load`: training on a `Task` in one call, and its result.

`planning` turns the arguments into an ordinary experiment; `result` holds its outcome.
"""
