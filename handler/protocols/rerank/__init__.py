"""The dialect of Cohere's rerank API, which vLLM and Jina AI also implement."""
