"""The values that everything shares, and what is made of them: errors, text, sequences, bytes."""
