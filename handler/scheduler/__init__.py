"""Scheduling of an engine's requests."""
