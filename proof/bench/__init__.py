"""Load tests for a server, and for its engine without the server. The server itself does not import this package."""
