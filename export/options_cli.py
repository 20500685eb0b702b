"""The options that the exporting commands share: their types and their help.

Owns what a person reads of them. Knows nothing of what a command does with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Store: TypeAlias = Annotated[str, typer.Argument(help="The run's store.")]
Ref: TypeAlias = Annotated[str | None, typer.Option(help="Which commit; the newest one else.")]
Tokenizer: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder of a tokenizer.json; the store's own else.")
]
Average: TypeAlias = Annotated[
    str | None, typer.Option(help="REF,REF…: the mean of these commits' weights.")
]
MergeInto: TypeAlias = Annotated[
    str | None,
    typer.Option(help="packed or imported: the base of adapters that were trained over nf4."),
]
AllowPaddedVocabulary: TypeAlias = Annotated[
    bool, typer.Option(help="The model may have more ids than the tokenizer.")
]
AllowNetwork: TypeAlias = Annotated[bool, typer.Option(help="Read from a network file system.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def refs_of(average: str | None) -> tuple[str, ...]:
    """Give the names in the value of `--average`; none where it was not given."""
    return () if average is None else tuple(filter(None, average.split(",")))
