"""Engines that are remote servers: choice of a server for each request, and failover."""
