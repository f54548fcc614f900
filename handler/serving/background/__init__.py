"""Background responses of the Responses API: their tables, and those that run on this server."""
