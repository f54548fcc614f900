"""Parsing of an assistant's answer into text, reasoning and tool calls, which every chat dialect renders."""
