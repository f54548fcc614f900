"""`lmi replay`: sends recorded requests to a server, and compares its responses with a recording or another server."""
