"""An engine that works without a model."""
