"""patch_torch, and what stands under the names of stock DCP while it is active."""
