"""Hugging Face model directories."""
