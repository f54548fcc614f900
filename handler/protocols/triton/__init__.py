"""The dialects of Triton's generate extension and of its inference with tensors."""
