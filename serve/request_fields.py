"""The fields of a JSON body, checked one by one.

Owns what is a number, a text, a list. Knows nothing of what they mean. Invariants: a wrong value
is refused with its name and what it should be; a field nobody asked for is refused too, because
a misspelt parameter that is ignored changes the answer silently. `null` means absent.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from serve.errors import ApiError, bad_value
from serve.vocabulary import check_text

DEPTH_MAX = 64


class Fields:
    """A body that knows which of its fields were read."""

    def __init__(self, body: Mapping[str, Any], *, within: str = "") -> None:
        self._body = body
        self._within = within
        self._known: set[str] = set()

    def value(self, name: str) -> Any:
        """Give a field as it stands, None where it is absent."""
        self._known.add(name)
        return self._body.get(name)

    def has(self, name: str) -> bool:
        """Say whether a field has a value."""
        return self.value(name) is not None

    def path(self, name: str) -> str:
        """Give a field's name with that of what it lies in."""
        return f"{self._within}.{name}" if self._within else name

    def number(
        self,
        name: str,
        default: float,
        *,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> float:
        """Give a number within its bounds."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(name, "a number")
        if not low <= value <= high:  # also what is not a number at all
            raise bad_value(self.path(name), f"{_shown(value)} is not {_range(low, high)}")
        return float(value)

    def integer(
        self, name: str, default: int | None, *, low: int, high: int = 1 << 62
    ) -> int | None:
        """Give a whole number within its bounds."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(name, "a whole number")
        if not low <= value <= high:
            raise bad_value(self.path(name), f"{_shown(value)} is not {_range(low, high)}")
        return value

    def count(self, name: str, default: int, *, low: int, high: int = 1 << 62) -> int:
        """Give a whole number that is always there."""
        value = self.integer(name, default, low=low, high=high)
        assert value is not None, "the default is a number"
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Give true or false."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong_type(name, "true or false")
        return value

    def text(self, name: str, *, needed: bool = False) -> str:
        """Give a text; an empty one where it is absent."""
        value = self.value(name)
        if value is None:
            if needed:
                raise ApiError(
                    400,
                    f"you must provide '{self.path(name)}'",
                    code="missing_required_parameter",
                    param=self.path(name),
                )
            return ""
        if not isinstance(value, str):
            raise self._wrong_type(name, "a text")
        return check_text(value, self.path(name))

    def inner(self, name: str) -> Fields:
        """Give an object's fields; those of an empty one where it is absent."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong_type(name, "an object")
        return Fields(value or {}, within=self.path(name))

    def ignore(self, *names: str) -> None:
        """Take fields that change nothing here."""
        self._known.update(names)

    def refuse(self, names: Mapping[str, Any]) -> None:
        """Refuse fields that cannot be honoured, unless they hold what changes nothing."""
        for name, harmless in names.items():
            value = self.value(name)
            if value is not None and value not in harmless:
                raise ApiError(
                    400,
                    f"'{self.path(name)}' is not supported by this server",
                    code="unsupported_parameter",
                    param=self.path(name),
                )

    def close(self) -> None:
        """Refuse every field that was not read."""
        for name in self._body:
            if name not in self._known:
                near = difflib.get_close_matches(name, self._known, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise ApiError(
                    400,
                    f"Unrecognized request argument supplied: {self.path(name)[:80]}{hint}",
                    code="unknown_parameter",
                    param=self.path(name)[:80],
                )

    def _wrong_type(self, name: str, wanted: str) -> ApiError:
        return bad_value(self.path(name), f"give {wanted}", code="invalid_type")


def parse_body(data: bytes) -> Mapping[str, Any]:
    """Read a JSON object; refuses everything else, numbers that JSON does not have included."""
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, f"We could not parse the JSON body of your request: {error}", code="invalid_json"
        ) from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if _is_deep([body]):
        raise ApiError(400, f"the body nests deeper than {DEPTH_MAX}", code="invalid_json")
    return body


def _is_deep(level: list[Any]) -> bool:
    """Say whether values nest deeper than any request needs."""
    for _ in range(DEPTH_MAX):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [v for v in value.values() if isinstance(v, dict | list)]
    return [v for v in value if isinstance(v, dict | list)]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _range(low: float, high: float) -> str:
    if math.isinf(high) or high == 1 << 62:
        return f"{low:g} or more"
    return f"from {low:g} to {high:g}"


def _shown(value: float) -> str:
    return str(value) if abs(value) < 1e30 else "a very large number"
