"""A model's own response template, which describes how a response is divided into reasoning, text and tool calls.

It is `response_template` in tokenizer_config.json. transformers (`utils/chat_parsing`) and vLLM (`hf`) also read it.
"""
