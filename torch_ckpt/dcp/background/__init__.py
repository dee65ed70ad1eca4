"""Saves beside training, in a thread or in another process."""
