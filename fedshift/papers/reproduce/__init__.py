"""Printed tables again: which runs a table needs, doing them, and setting the results beside."""
