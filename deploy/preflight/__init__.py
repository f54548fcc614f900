"""What would fail, looked at before anything is made: read-only."""
