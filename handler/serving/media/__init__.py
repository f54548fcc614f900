"""Media of requests: fetched from where the options allow it, checked, and decoded off the event loop."""
