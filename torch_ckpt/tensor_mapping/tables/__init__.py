"""Tables: {"about": text, "pairs": [[stored view, native view], ...]}."""
