"""Values that a JSON schema allows, and why it refuses one."""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import rstr

from asyncrl.text.schemas import kinds_of, types_of

KINDS = ("string", "object", "number", "integer", "array", "boolean", "null")
"""Types of JSON, in the order in which they are tried."""
DEEPEST = 8
"""Levels of values in an example."""
MOST = 1000
"""Items, keys or characters that an example gets because of a lower limit."""
LOWEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
HIGHEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
FORMATS = {
    "date": "2024-02-29",
    "date-time": "2024-02-29T12:30:00Z",
    "time": "12:30:00Z",
    "duration": "P1D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/a",
    "url": "https://example.com/a",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
}
"""Format → a text of it."""
SAMPLES = 30
"""Texts that are made for a pattern, the shortest first."""


@dataclass(frozen=True, slots=True)
class Example:
    """How a value is made from a schema."""

    text: str = "a"
    """Texts in it."""
    choice: int = 0
    """Which value, where a schema offers several. The last one if it has fewer."""
    sparse: bool = False
    """Whether an object has only the keys that it must have."""
    given: bool = False
    """Whether the schema's own examples and default values are taken."""

    def of(self, schema: object, depth: int = 0, number: int = 0) -> Any:
        """A value that the schema allows, as far as that is simple. `refusal` says whether it does.

        Args:
            number: counts the items of a list, which may have to differ.
        """
        flat = self._flat(schema)
        if "const" in flat:
            return flat["const"]
        if options := _list(flat.get("enum")):
            return options[(min(self.choice, len(options) - 1) + number) % len(options)]
        if self.given and (known := [*_list(flat.get("examples")), *_default(flat)]):
            return known[number % len(known)]
        kinds = types_of(flat)
        allowed = [kind for kind in KINDS if kind in kinds]
        match allowed[min(self.choice, len(allowed) - 1)]:
            case "object":
                return self.as_object(flat, depth)
            case "array":
                return self._array(flat, depth)
            case "integer":
                return _number(flat, True, number)
            case "number":
                return _number(flat, False, number)
            case "boolean":
                return not number % 2
            case "null":
                return None
        return self._string(flat, number)

    def as_object(self, schema: object, depth: int = 0) -> dict[str, object]:
        """An object that the schema allows, as far as that is simple."""
        flat = self._flat(schema)
        if depth >= DEEPEST:
            return {}
        named, more = flat.get("properties"), flat.get("additionalProperties")
        fields: dict[str, object] = dict(named) if isinstance(named, Mapping) else {}
        needed = [str(name) for name in _list(flat.get("required"))]
        if self.sparse:
            fields = {name: one for name, one in fields.items() if name in needed}
        fields |= {name: more for name in needed if name not in fields}
        free: object = more
        if isinstance(by_pattern := flat.get("patternProperties"), Mapping) and by_pattern:
            pattern, free = next(iter(by_pattern.items()))
            names = [_matching(pattern, least) or "a" for least in (1, 9, 17)]
        else:
            named_as = {"type": "string", "allOf": [flat.get("propertyNames")]}
            count = _bound(flat, "minProperties", 0) + 1
            names = [str(Example().of(named_as, number=number)) for number in range(count)]
        if not fields and not self.sparse and isinstance(free, Mapping):
            fields[names[0]] = free
        if depth and not fields and not self.sparse and more is not False:
            return {"a": [1, {"b": self.text}]}
        for name in names:
            if len(fields) < _bound(flat, "minProperties", 0):
                fields.setdefault(name, free)
        return {str(name): self.of(one, depth + 1) for name, one in fields.items()}

    def _flat(self, schema: object) -> dict[str, Any]:
        """The schema with one of its choices and all of its parts in it, as far as they fit."""
        schema = schema if isinstance(schema, Mapping) else {}
        parts = _list(schema.get("allOf"))
        for name in ("anyOf", "oneOf"):
            if options := _list(schema.get(name)):
                parts = [*parts, options[min(self.choice, len(options) - 1)]]
        flat = {key: one for key, one in schema.items() if key not in ("allOf", "anyOf", "oneOf")}
        for part in map(self._flat, parts):
            for key, value in part.items():
                flat[key] = _both(key, flat[key], value) if key in flat else value
        return flat

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[object]:
        items: Any = schema.get("items")
        first = _list(schema.get("prefixItems"))
        if isinstance(items, list):  # of older drafts
            first, items = items, schema.get("additionalItems")
        most = min(_bound(schema, "maxItems", MOST), MOST // 30**depth * 30)
        count = max(len(first) if first and not items else len(first) + 1, 1)
        count = min(max(count, _bound(schema, "minItems", 0)), most)
        item = items or schema.get("contains")
        all_items = [*first, *[item] * count][:count]
        if depth >= DEEPEST:
            return []
        return [self.of(one, depth + 1, number) for number, one in enumerate(all_items)]

    def _string(self, schema: Mapping[str, Any], number: int) -> str:
        least, most = _bound(schema, "minLength", 0), _bound(schema, "maxLength", MOST)
        fits = _matching(str(schema.get("pattern") or ""), max(least, number + 1), most)
        if fits:
            return fits
        if known := FORMATS.get(str(schema.get("format"))):
            return known
        text = self.text + (str(number) if number else "")
        return (text * max(1, math.ceil(least / len(text))))[-most:] if most else ""


def refusal(schema: object, value: object) -> str:
    """Why the schema does not allow the value, in a line. Empty if it does, or if it is no JSON
    schema."""
    from jsonschema.exceptions import best_match  # imported here because it takes long

    try:
        error = best_match(_validator()(_without_nulls(schema)).iter_errors(value))
    except Exception:  # schemas of users may have anything in them
        return ""
    return "" if error is None else f"{error.json_path}: {' '.join(error.message.split())[:200]}"


@functools.cache
def _validator() -> Any:
    """jsonschema's class of validators, with `_wrong_type`."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    return extend(Draft202012Validator, {"type": _wrong_type})


def _wrong_type(validator: Any, kinds: object, value: object, schema: Any) -> Iterator[Any]:
    """The check of `type`, which knows the names that `types_of` knows."""
    from jsonschema.exceptions import ValidationError

    declared = types_of({"type": kinds, "nullable": schema.get("nullable")})
    if not declared & kinds_of(value):
        yield ValidationError(f"{value!r} is not of type {kinds!r}")


def _without_nulls(schema: object) -> object:
    """The schema without keywords that are null, which dumps of schemas have."""
    if isinstance(schema, list | tuple):
        return [_without_nulls(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: one for key, one in schema.items() if one is not None or key == "const"}
    return {
        key: one if key in ("const", "enum") else _without_nulls(one) for key, one in kept.items()
    }


def _both(key: str, some: Any, more: Any) -> Any:
    """The value of a keyword that holds where both do, as far as that is simple."""
    if key in LOWEST + HIGHEST and _is_number(some) and _is_number(more):
        return (max if key in LOWEST else min)(some, more)
    if key == "type":
        return sorted(types_of({"type": some}) & types_of({"type": more})) or some
    if key == "required":
        return [*_list(some), *_list(more)]
    if key == "enum":
        return [one for one in _list(some) if one in _list(more)] or some
    if key == "properties" and isinstance(some, Mapping) and isinstance(more, Mapping):
        joined = {name: {"allOf": [some[name], more[name]]} for name in some if name in more}
        return {**some, **more, **joined}
    return some


def _number(schema: Mapping[str, Any], whole: bool, number: int) -> float:
    """42 or 1.5, or another number between the limits that are numbers."""
    low = max([-math.inf, *(schema[key] for key in LOWEST[:2] if _is_number(schema.get(key)))])
    high = min([math.inf, *(schema[key] for key in HIGHEST[:2] if _is_number(schema.get(key)))])
    given: Any = schema.get("multipleOf")
    step = given if _is_number(given) and given > 0 else 1 if whole else None
    shift = number * (step or 1)
    near = (42 if whole else 1.5, low, low + 1, high, high - 1, (low + high) / 2)
    tried = [one + shift for one in near if math.isfinite(one)]
    if step:
        tried = [turn(one / step) * step for one in tried for turn in (math.ceil, math.floor)]
    taken = (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
    good = [one for one in tried if low <= one <= high and one not in taken]
    found = (good or tried)[0]
    return int(found) if whole else found


@functools.lru_cache(maxsize=256)
def _matching(pattern: str, least: int = 1, most: int = MOST) -> str:
    """A text that a pattern fits, of a length between the limits if one was found; empty if it is
    no pattern. Other `least` give other texts, where the pattern has several."""
    texts = []
    try:
        for size in range(SAMPLES if pattern else 0):
            texts.append(_Texts(random.Random(f"{least} {size}"), size).xeger(pattern))
            fits = re.search(pattern, texts[-1])
            if fits and least <= len(texts[-1]) <= most:
                return texts[-1]
    except Exception:  # patterns of users may be anything
        return ""
    return next((text for text in texts if re.search(pattern, text)), "")


class _Texts(rstr.Rstr):
    """Texts of patterns.

    Args:
        size: the more, the more often a part may be repeated.
    """

    def __init__(self, source: random.Random, size: int) -> None:
        super().__init__(source)
        self._more = size * size // 8

    def _handle_repeat(self, start_range: int, end_range: int, value: Any) -> str:
        """rstr's own repeats a part 100 times at most, and up to 100 times within another."""
        count = self._random.randint(start_range, min(end_range, start_range + self._more))
        return "".join(self._handle_state(state) for _ in range(count) for state in value)


def _list(value: object) -> list[Any]:
    """A list of a schema. Schemas of users may have anything instead, which counts as empty."""
    return value if isinstance(value, list) else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _bound(schema: Mapping[str, Any], key: str, default: int) -> int:
    """A limit on a length."""
    found = schema.get(key)
    return min(int(found), MOST) if _is_number(found) else default  # type: ignore[arg-type]


def _default(schema: Mapping[str, Any]) -> list[object]:
    return [schema["default"]] if schema.get("default") is not None else []
