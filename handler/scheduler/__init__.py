"""Schedules the requests of one engine."""
