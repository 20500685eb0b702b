"""The decoder as a list of stages: configuration, presets, layers, stages, initial values.

Knows tensors and their names. Knows nothing of stores, optimizers, devices or data.
"""
