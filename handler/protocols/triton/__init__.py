"""The dialects of Triton's generate extension and of its tensor inference."""
