"""What a rank reads: the storage reader, and the steps behind it."""
