"""Tool calls: reading them from a request, showing tools in a prompt, and reading calls from an answer's text."""
