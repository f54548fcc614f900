"""Find before `up` what would fail. Read-only."""
