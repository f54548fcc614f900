"""LoRA adapters: which there are, and how they change."""
