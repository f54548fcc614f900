"""A user's model.py: how its formatters are found and run."""
