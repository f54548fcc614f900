"""The engine without a model."""
