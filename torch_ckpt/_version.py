"""The version, which takes longer to find out than the command takes to start."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("torch_ckpt")
except PackageNotFoundError:  # a checkout on the path that was never installed
    __version__ = "0.0.0"
