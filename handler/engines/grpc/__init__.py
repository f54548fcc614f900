"""Servers of vLLM, SGLang and TensorRT-LLM by gRPC: token ids go to them, and token ids come back."""
