"""What is too long for CI, and the page of what came of it."""
