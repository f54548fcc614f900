"""Reasoning: the marks around a model's thoughts by family, and the parser that separates them from its answer."""
