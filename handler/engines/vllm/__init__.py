"""vLLM, on GPUs, and on CPUs by its CPU build."""
