"""Engine that uses servers of vLLM, SGLang and TensorRT-LLM through gRPC. Prompts and answers are sent as token ids."""
