"""Tools that prove what a server does, by its APIs alone: replay, conformance, and load."""
