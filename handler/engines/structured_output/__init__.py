"""Structured output: validation of schemas and grammars in a sandbox, and conversion of JSON schemas to grammars."""
