"""A model's memory, from its files (local, in S3 or on a hub), or from the table of known models.

`files` and `hub` read pieces of files by name, `safetensors` and `gguf` their headers. `config` checks config.json,
`weights` counts weights and caches, `quantization` their bytes. `shape` puts them together.
"""
