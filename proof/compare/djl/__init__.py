"""Handlers in DJL Serving's worker, compared through DJL's Java side; beside it the others' model.py."""
