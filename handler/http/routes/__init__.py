"""The HTTP routes, one file a dialect."""
