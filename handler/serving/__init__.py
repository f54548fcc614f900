"""A served model and its running requests, shared by the HTTP server and DJL."""
