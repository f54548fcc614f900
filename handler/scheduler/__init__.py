"""Requests in flight on one engine."""
