"""Batches, whose requests and responses are lines of files."""
