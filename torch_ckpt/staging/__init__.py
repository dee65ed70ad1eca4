"""Copies of states in host memory, and how they cross to another process."""
