"""Background responses of the Responses API: their tables, and the ones that are running on this server."""
