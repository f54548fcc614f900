"""Decide what a specification leaves open: instance, image, host, timeouts."""
