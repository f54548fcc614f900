"""Routes of vLLM's own server beside OpenAI's: tokens, scores of pairs, the version, LoRA adapters."""
