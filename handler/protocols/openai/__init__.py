"""OpenAI's dialects, and its files and batches."""
