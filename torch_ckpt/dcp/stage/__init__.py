"""Copies of states in host memory."""
