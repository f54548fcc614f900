"""A model's need of memory, read from its files: here, in S3, on a hub, or from the table of known models.

`files` and `hub` read pieces of files by name, `safetensors` and `gguf` their headers. `config` checks config.json,
`layers` says what each layer keeps, `weights` counts, `quantization` weighs. `shape` puts them together.
"""
