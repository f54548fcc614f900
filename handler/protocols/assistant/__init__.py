"""Structured events of an assistant's answer, which every chat dialect renders: text, reasoning and tool calls."""
