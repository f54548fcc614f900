"""LMI's dialect."""
