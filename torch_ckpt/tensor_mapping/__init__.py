"""One mapping of names and shapes, as data: pairs of views, and tables of them. Nothing here needs
torch."""
