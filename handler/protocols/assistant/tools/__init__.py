"""Tools in requests and prompts, and parsers of tool calls in answers."""
