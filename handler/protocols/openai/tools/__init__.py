"""Calls of tools: what a request says of them, how a prompt shows them, how an answer's text is read for them."""
