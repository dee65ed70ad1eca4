"""Imports every file of rows, in the order of the report; a new file is added here."""

# ruff: noqa: F401, I001
from benchmarks import row_limits
from benchmarks import row_save
from benchmarks import row_save_cuda
from benchmarks import bench_async
from benchmarks import row_stage_cuda
from benchmarks import row_load
from benchmarks import row_load_cuda
from benchmarks import row_load_many
from benchmarks import row_consolidate
from benchmarks import bench_export
from benchmarks import bench_training
from benchmarks import row_training_calls
from benchmarks import bench_bases
from benchmarks import row_load_plan
from benchmarks import row_load_dcp
from benchmarks import row_reshard
from benchmarks import row_convert
from benchmarks import row_convert_chunks
from benchmarks import row_open
from benchmarks import row_boxes
from benchmarks import row_import
from benchmarks import bench_megatron
from benchmarks import bench_megatron_plan
from benchmarks import row_many_ranks
from benchmarks import row_colliding
