"""`lmi replay`: sends recorded requests to a server, and compares its answers with recorded or other live ones."""
