"""Your data: from tables, arrays, folders and data sets to a federation with a target.

`task` has `fedshift.Task`, `rows` the examples that it holds, and `building` cuts and encodes them.
"""
