"""Commands that take a specification."""
