"""Comparisons with other servers on the same machine. In a checkout, run `python -m tests.compare.NAME`."""
