"""GptManager's tensors as parameters and outputs."""
