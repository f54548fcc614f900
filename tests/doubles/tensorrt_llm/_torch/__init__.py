"""Parts of the PyTorch backend."""
