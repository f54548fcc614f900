"""Routes of vLLM's own server in addition to OpenAI's: tokens, scores of pairs, the version, LoRA adapters."""
