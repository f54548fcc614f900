"""The embedded HTTP server: ASGI application, connections, security, routes and pages."""
