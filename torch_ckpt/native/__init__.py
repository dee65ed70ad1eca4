"""The doors to both libraries, and what is held there."""
