"""Benchmarks: torch_ckpt, its rivals and the machine's limits, interleaved in one run.

``python -m benchmarks`` runs every row; docs/benchmarks.md tells how they are measured. A row is
a function in one of the ``row_*.py`` files or in ``bench_async.py``, decorated with ``@row``; a
contender of a row is one :class:`benchmarks.contender.Contender`.
"""
