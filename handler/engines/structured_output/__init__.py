"""Structured output: validation of clients' texts in a sandbox, and JSON schemas as grammars."""
