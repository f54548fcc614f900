"""Hugging Face directories, for the GPU engines."""
