"""Interchange: store to Hugging Face and GGUF packages and back.

Owns the translation of shards into other projects' package layouts. Knows nothing of training
steps, optimizers or HTTP. May import `shardb` and `trainer.model`, nothing else of this project.
No format is written yet; the package is here so that the import rules hold from the first day.
"""
