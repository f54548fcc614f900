"""A model's size and shape, from its files (local, in S3 or on the hub) or from the table of known models.

`files` reads parts of files and config.json, `gguf` and `quantization` read the headers of weight files, `weights`
computes the numbers of weights and the size of the cache, and `shape` combines the results.
"""
