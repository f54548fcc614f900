"""The engine that runs models on GPUs with TensorRT-LLM's LLM API."""
