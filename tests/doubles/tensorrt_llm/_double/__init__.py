"""What the double does behind the names that TensorRT-LLM has too."""
