"""User-defined Python files such as model.py: their decorators, and how they are loaded and run."""
