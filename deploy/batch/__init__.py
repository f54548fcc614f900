"""Batch transform jobs, which answer files of requests without an endpoint."""
