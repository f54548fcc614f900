"""Anthropic's Messages API, as a client of the chat's readers."""
