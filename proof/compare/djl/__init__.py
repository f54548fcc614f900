"""Handlers in DJL Serving's worker, compared through DJL's Java side, and the others' model.py."""
