"""The tests that meet torch, on each torch and Python that installs."""
