"""Batch jobs, which read requests from a file and write responses to a file, one per line."""
