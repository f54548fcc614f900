"""What a replay found: as a table, as JSON and as a page, with one example of each class."""
