"""Measure an endpoint under load, and derive the concurrency that its scaling should track."""
