"""What an option's value may be, from its annotation: typed text and config values to Python's.

Known annotations: int, float, bool, str, `Literal[...]`, `tuple[X, ...]`, None, unions of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

IN_WORDS = {
    int: "a whole number (such as 1000 or 1e3)",
    float: "a finite number (such as 0.1 or 3e-4)",
    bool: "true or false",
    str: "text",
    type(None): "none",
}
IN_SHORT = {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT", type(None): "none"}


def parse_value(annotation: Any, text: str, name: str) -> Any:
    """`text`, as typed, as a value of `annotation`; `tuple[X, ...]` gives a tuple of one.

    "none" and "auto" give None where None is allowed. A str stays as it is, whatever it looks like.
    Raises ValueError that says the name, the text and what is allowed.
    """
    try:
        return _parse(annotation, text)
    except ValueError:
        typed = text if text.isprintable() else repr(text)
        raise ValueError(f"{name}={typed}: must be {in_words(annotation)}") from None


def _parse(annotation: Any, text: str) -> Any:
    if annotation is str:
        return text
    if annotation is bool:
        return _choose(BOOLS, text.strip().lower())
    if annotation is int:
        return _parse_int(text)
    if annotation is float:
        return _finite(float(text))
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        return _choose({str(choice): choice for choice in members}, text)
    if get_origin(annotation) is tuple:
        return (_parse(members[0], text),)
    if is_union(annotation):
        return _parse_union(members, text)
    raise TypeError(f"an option cannot be of type {annotation}")


def _parse_union(members: tuple[Any, ...], text: str) -> Any:
    # Literals first: in `int | None | Literal["auto"]` the word auto is a value of its own.
    for member in sorted(members, key=lambda member: get_origin(member) is not Literal):
        try:
            return _parse_none(text) if member is type(None) else _parse(member, text)
        except ValueError:
            continue
    raise ValueError(text)


def _parse_none(text: str) -> None:
    if text.strip().lower() not in ("none", "auto"):
        raise ValueError(text)


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)  # 1e3 is a whole number too; beyond 2**53 a float is not exact
        if number.is_integer() and abs(number) < 2**53:
            return int(number)
        raise


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(number)
    return number


def _choose(choices: Mapping[str, Any], text: str) -> Any:
    if text not in choices:
        raise ValueError(text)
    return choices[text]


def conform(annotation: Any, value: Any, name: str) -> Any:
    """`value`, from a config file or JSON, as the annotation's type: 1 becomes 1.0, a list a tuple.

    Raises ValueError that says the name, the value and what is allowed.
    """
    try:
        return _conform(annotation, value)
    except (ValueError, OverflowError):
        raise ValueError(f"{name}={value!r}: must be {in_words(annotation)}") from None


def _conform(annotation: Any, value: Any) -> Any:
    members = get_args(annotation)
    if is_union(annotation):
        for member in members:
            try:
                return _conform(member, value)
            except ValueError:
                continue
    elif get_origin(annotation) is Literal:
        if any(value == choice and type(value) is type(choice) for choice in members):
            return value
    elif get_origin(annotation) is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_conform(members[0], item) for item in value)
    elif annotation is float and type(value) in (int, float):
        return _finite(float(value))
    elif type(value) is annotation:  # exactly: True is no whole number
        return value
    raise ValueError(value)


def is_union(annotation: Any) -> bool:
    # `int | None` and `Union[int, None]` have different origins before Python 3.14.
    origin = get_origin(annotation)
    return origin is Union or getattr(origin, "__name__", "") == "UnionType"


def in_words(annotation: Any) -> str:
    """What may be typed, for messages: "auto or float32"."""
    return _spell(annotation, IN_WORDS, " or ")


def in_short(annotation: Any) -> str:
    """What may be typed, for help and tables: "INT|none"."""
    return _spell(annotation, IN_SHORT, "|")


def _spell(annotation: Any, names: Mapping[type, str], between: str) -> str:
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        return between.join(map(str, members))
    if get_origin(annotation) is tuple:
        return _spell(members[0], names, between) + " (may be repeated)"
    if is_union(annotation):
        return between.join(_spell(member, names, between) for member in members)
    return names[annotation]
