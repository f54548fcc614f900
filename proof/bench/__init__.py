"""Measure a server from outside, and its engine without the server. Nothing that serves imports this package."""
