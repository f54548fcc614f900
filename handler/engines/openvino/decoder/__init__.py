"""Language models of the Llama, Qwen and Gemma families: their checkpoints as OpenVINO's graphs, without torch."""
