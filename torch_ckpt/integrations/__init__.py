"""Checkpoint managers of training frameworks, with their policy and our saves and loads. None of
the frameworks is a dependency: a module here imports its own when it is imported."""
