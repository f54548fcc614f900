"""OpenAI's Responses API, built on the readers of OpenAI's chats."""
