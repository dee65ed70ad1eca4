"""How to save and load: options."""
