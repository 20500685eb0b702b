"""Streaming training: model stages, engine, device, optimizers, data and the `train` command.

A training step is one transaction of `shardb` over every shard of the model; nothing here keeps a
whole model in memory. Imports `shardb` and never `export` or `serve`.
"""
