"""Tools in requests and prompts, and parsers of tool calls in responses."""
