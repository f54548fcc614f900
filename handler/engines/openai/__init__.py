"""An engine that uses servers with OpenAI's API: vLLM, Dynamo, or this handler on another machine."""
