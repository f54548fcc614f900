"""LMI's dialects."""
