"""What a rank writes, and its commit: the storage writer, and the steps behind it."""
