"""What hostile clients and models send: the work is linear in its length, and the event loop goes on turning."""
