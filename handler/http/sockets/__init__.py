"""WebSockets, whose messages are requests for the routes of the server."""
