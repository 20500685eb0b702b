"""Data of a training run: token rows on disk, their order, and how they are made from text.

Calls go down: `train-data` -> `prepare` -> split, tokenizer, packing -> readers; and `batches` ->
`order`, `rows` -> `manifest`. Knows nothing of models, of the store or of devices.
"""
