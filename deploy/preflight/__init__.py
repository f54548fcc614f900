"""Read-only checks for problems that would make a deployment fail."""
