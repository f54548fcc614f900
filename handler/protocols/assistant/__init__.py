"""Structured events of an assistant's answer, which every chat dialect renders: text and tool calls."""
