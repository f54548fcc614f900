"""Batch transform jobs, which process files of requests without an endpoint."""
