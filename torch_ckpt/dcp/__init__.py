"""torch.distributed.checkpoint's protocol on the engine: writer, reader, planners, entry points."""
