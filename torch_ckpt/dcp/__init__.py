"""torch.distributed.checkpoint's protocol on the engine: planners, reader, stager, writer."""
