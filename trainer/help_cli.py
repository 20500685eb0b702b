"""How the help of a command prints its options: plain lines, in groups, with no name cut short.

Owns that form. Knows nothing of commands. The library's tables shorten long flags on a terminal of
80 columns, and who types a shortened flag is refused.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

ARGUMENTS, OTHERS = "Arguments", "Options"


class GroupedCommand(TyperCommand):
    """A command whose options stand below the titles they were given, in that order."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write every group, those without a title at the end."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                named = ARGUMENTS if parameter.param_type_name == "argument" else OTHERS
                title = getattr(parameter, "rich_help_panel", None) or named
                groups.setdefault(title, []).append(record)
        for title in sorted(groups, key=lambda title: title == OTHERS):
            with formatter.section(title):
                formatter.write_dl(groups[title])
