"""FSDP2: the Accelerator that shards networks over ranks, how it does it, and who asks for it."""
