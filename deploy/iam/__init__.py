"""Who must be allowed what."""
