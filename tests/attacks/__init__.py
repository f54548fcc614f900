"""Hostile clients and models: the work is linear in what they send, and the event loop goes on turning."""
