"""Conversion of Llama, Mistral, Qwen and Gemma checkpoints to OpenVINO's format, without torch."""
