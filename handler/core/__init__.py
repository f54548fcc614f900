"""Values that all packages share, and basic modules such as errors, logging, framing and child processes."""
