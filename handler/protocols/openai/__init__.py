"""The dialects of OpenAI's APIs, and OpenAI's files and batches."""
