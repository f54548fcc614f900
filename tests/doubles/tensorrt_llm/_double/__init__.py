"""The double's own parts, behind the names that TensorRT-LLM has too."""
