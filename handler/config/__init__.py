"""The configuration: tables of options, readers of their sources, and the model's and user's files."""
