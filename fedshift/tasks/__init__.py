"""Your data: from tables, arrays, folders and data sets to a federation with a target.

`task` has the door, `fedshift.Task`; `rows` what it holds, `building` how it is cut and encoded.
"""
