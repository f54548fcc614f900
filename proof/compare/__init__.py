"""Comparisons of this server with others on the same machine. In a checkout, run `python -m proof.compare.NAME`."""
