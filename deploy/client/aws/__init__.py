"""AWS for the client: credentials, the runtime API and its errors."""
