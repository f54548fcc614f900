"""The dialect of Cohere's rerank, which vLLM and Jina AI imitate."""
