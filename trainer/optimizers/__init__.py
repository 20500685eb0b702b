"""Optimizers that update one shard at a time, in tiles, from a read view into a staged image."""
