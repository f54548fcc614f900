"""Engine that uses servers of OpenAI's API: vLLM, Dynamo, or this handler on another machine."""
