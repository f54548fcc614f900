"""An engine that uses vLLM, SGLang and TensorRT-LLM servers through gRPC. Prompts and responses are token ids."""
