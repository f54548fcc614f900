"""Values that all packages share, and the basics: errors, text, framing, processes."""
