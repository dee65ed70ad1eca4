"""What the ranks read: the storage reader."""
