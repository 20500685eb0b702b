"""A model of transformers, built without memory, whose parts run as stages.

Owns every use of transformers by stages: reading a configuration, building the model on `meta`, and
asking its own code what each layer is handed. Knows nothing of stores or shards. Needs the extra
`hf`; InputError says so where it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import InputError


def filled_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give a configuration with every field that its family fills in."""
    return dict(read_config(config).to_dict())


def read_config(config: Mapping[str, Any]) -> Any:
    """Read a configuration as transformers does; InputError for what it refuses."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    auto = _transformers().AutoConfig
    try:
        return auto.for_model(config["model_type"], **values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"transformers cannot read this {config['model_type']} configuration ({error}): mend"
            " config.json"
        ) from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "this model's blocks are computed by the layers of transformers, which is not"
            " installed: pip install 'shardb[hf]'"
        ) from error
    return transformers
