"""The engine that runs models with vLLM: on GPUs, or on CPUs with vLLM's CPU build."""
