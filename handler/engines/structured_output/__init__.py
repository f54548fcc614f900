"""Structured output: schemas checked before the engine gets them, and as grammars."""
