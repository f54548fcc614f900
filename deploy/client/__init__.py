"""Talk to an endpoint: `Predictor`."""
