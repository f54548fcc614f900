"""A user's model.py and other Python files: their decorators, and how they are loaded and run."""
