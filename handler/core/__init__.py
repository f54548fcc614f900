"""Values shared by all packages, and basics such as errors, text, framing and processes."""
