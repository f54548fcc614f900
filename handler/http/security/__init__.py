"""Who may call the server, and from where."""
