"""Anthropic's Messages API, built on the readers of OpenAI chat requests."""
