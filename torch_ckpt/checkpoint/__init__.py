"""A checkpoint as an object and as data: no torch."""
