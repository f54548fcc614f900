"""The routes that vLLM's server adds to OpenAI's: tokenization, pooling, scores, the version and LoRA adapters."""
