"""OpenAI's Responses API, built on the readers of OpenAI chat requests."""
