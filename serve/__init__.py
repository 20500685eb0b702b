"""Shard-native inference and its HTTP surface.

Owns requests, their leases and their key/value caches. Knows nothing of training. May import
`shardb`, `trainer.model` and `trainer.device`, and of the trainer's surface its errors and the way
its commands answer. From the bottom up: pinned commits and their weights, pages of keys and values,
the arithmetic of a stage, the sweep, the scheduler; above them the HTTP side.
"""
