"""Batches of requests in files."""
