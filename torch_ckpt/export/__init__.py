"""Consolidation to files of Hugging Face, and which file, name and dtype a tensor goes to."""
