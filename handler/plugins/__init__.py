"""A user's model.py: decorators, loading, running."""
