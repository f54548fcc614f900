"""A model's own response template: how the text of its answers is divided into thoughts, text and calls.

transformers (`utils/chat_parsing`) reads it from `response_template` in tokenizer_config.json, and so does vLLM's `hf`.
"""
