"""LoRA adapters: their states, their files, and the calls that change them."""
