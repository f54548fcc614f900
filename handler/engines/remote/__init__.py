"""Engines that use remote servers: they choose a server for each request, and fail over to others."""
