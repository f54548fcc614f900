"""How an endpoint bears load, and how many requests at once its scaling should aim at."""
