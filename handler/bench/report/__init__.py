"""Results of a measurement: as a table, as JSON, as a picture, and compared with others."""
