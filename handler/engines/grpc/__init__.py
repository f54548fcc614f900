"""An engine that uses vLLM, SGLang and TensorRT-LLM servers through gRPC. Prompts and answers are sent as token ids."""
