"""Shard-native inference and its HTTP surface.

Owns requests, their leases and their key/value caches. Knows nothing of training. May import
`shardb`, `trainer.model` and `trainer.device`, nothing else of this project. Nothing is served
yet; the package is here so that the import rules hold from the first day.
"""
