"""Check before `up` for what would fail. Read-only."""
