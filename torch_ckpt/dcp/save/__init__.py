"""What the ranks write, and its commit: the storage writer."""
