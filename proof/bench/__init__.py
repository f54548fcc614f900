"""Load tests of a server and of its engine without the server. The server itself does not import this package."""
