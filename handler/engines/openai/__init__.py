"""A server of OpenAI's API as an engine: vLLM, Dynamo, or this handler elsewhere."""
