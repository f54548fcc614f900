"""The engine that runs models with vLLM, on GPUs or, with vLLM's CPU build, on CPUs."""
