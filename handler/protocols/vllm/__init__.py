"""The routes that vLLM adds to those of OpenAI: tokenization, pooling, scores, the version and LoRA adapters."""
