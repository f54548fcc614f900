"""Engines that are remote servers: the choice of a server for each request, and failover."""
