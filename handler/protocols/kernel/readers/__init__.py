"""Readers of JSON: bodies, plain values, messages, adapters, structured output."""
