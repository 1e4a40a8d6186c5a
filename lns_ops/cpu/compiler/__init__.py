"""From Python functions to cached machine code, and the threads that run it."""
