"""TensorRT-LLM, on GPUs, through its LLM API."""
