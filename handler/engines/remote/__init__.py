"""Engines that are servers elsewhere: the choice of a server for each request, and what follows when one fails."""
