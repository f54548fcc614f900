"""The dialects for decisions: the probability of each option of a question about a state."""
