"""A training run: which state a program has, and how it comes back on as many ranks or others. No
I/O of its own: a save and a load of ours do it."""
