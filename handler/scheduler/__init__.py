"""Scheduling of engine requests."""
