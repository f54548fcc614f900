"""Replacements for parts of vLLM."""
