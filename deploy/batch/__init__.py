"""Batch transform: a job that answers files of requests, without an endpoint."""
