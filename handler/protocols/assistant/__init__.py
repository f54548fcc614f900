"""Parsers that split an assistant's response into text, reasoning and tool calls, which every chat dialect renders."""
