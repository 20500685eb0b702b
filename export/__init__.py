"""Interchange: store to Hugging Face and GGUF packages and back.

Owns the translation of shards into other projects' package layouts, and the proof that a package is
the store's model. Knows nothing of training steps, optimizers or HTTP. Of this project it may
import `shardb`, `trainer.model` and what every command shares, nothing else.
"""
