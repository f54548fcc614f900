"""OpenAI's Responses API, as a client of the chat's readers."""
