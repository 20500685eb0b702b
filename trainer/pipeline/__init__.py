"""One training step on a device as a pipeline: copies, compute, updates and digests overlap.

Does what `trainer.step.TrainStep` does, bit for bit, with buffers that live as long as the engine.
Import what you need from its modules.
"""
