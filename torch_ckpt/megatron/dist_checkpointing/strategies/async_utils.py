"""Saves in the background: requests, and the queue that runs them."""

from torch_ckpt.megatron.async_calls import AsyncCallsQueue, AsyncRequest

__all__ = ["AsyncCallsQueue", "AsyncRequest"]
