"""Options: their tables, and where their values come from."""
