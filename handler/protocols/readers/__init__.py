"""From JSON values to ours: bodies, plain values, messages, adapters, structured output."""
