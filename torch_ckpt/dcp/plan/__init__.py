"""Planners: who writes or reads what, in stock's items."""
