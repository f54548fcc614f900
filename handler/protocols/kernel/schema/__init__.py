"""JSON Schema: its pieces, of answers' types and of readers."""
