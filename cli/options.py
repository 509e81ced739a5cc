"""Options as dataclass fields: `--name=value`, help and exit codes. Standard library only.

A section is a dataclass; its fields are the options, `name: Annotated[type, "one line"] = default`.
A section called "" has no prefix, so its options are typed by their own name alone. Options of a
training run say after the line how a resume treats them (training/resume.py).
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Section = TypeVar("Section")

BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

IN_WORDS = {
    int: "a whole number (such as 1000 or 1e3)",
    float: "a finite number (such as 0.1 or 3e-4)",
    bool: "true or false",
    str: "text",
    type(None): "none",
}
IN_SHORT = {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT", type(None): "none"}


class ConfigError(ValueError):
    """A user's mistake, in plain words: the name, the value, what is allowed, what to do."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Option:
    """One field of one section."""

    section: str
    name: str
    annotation: Any
    help: str
    default: Any
    resume: str  # how a resume treats it (training/resume.py); "" outside of a training run

    @property
    def full_name(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def repeats(self) -> bool:
        return get_origin(self.annotation) is tuple


@dataclass
class Arguments:
    """What a command line said: section -> name -> value, the rest in order, and what is wrong."""

    values: dict[str, dict[str, Any]]
    positionals: list[str]
    problems: list[str]


def options_of(sections: Mapping[str, type]) -> list[Option]:
    """Every option of these sections, in the order of the fields."""
    return [option for name, cls in sections.items() for option in _options_of(name, cls)]


@cache
def _options_of(section: str, cls: type) -> list[Option]:
    found = []
    hints = get_type_hints(cls, include_extras=True)  # slow, hence the cache
    for field in fields(cls):
        annotation, text, resume = _without_notes(hints[field.name])
        default = field.default if field.default is not MISSING else None
        if field.default_factory is not MISSING:
            default = field.default_factory()
        found.append(Option(section, field.name, annotation, text, default, resume))
    return found


def _without_notes(annotation: Any) -> tuple[Any, str, str]:
    if get_origin(annotation) is Annotated:
        inner, text, *resume = get_args(annotation)
        return inner, text, "".join(resume)
    return annotation, "", ""


# The command line


def parse_arguments(
    argv: Sequence[str],
    sections: Mapping[str, type],
    *,
    positionals: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
) -> Arguments:
    """Read `--section.name=value`, `--name=value`, `--name value` and `--flag`; the rest in order.

    `positionals` names the rest: "RUN" is needed, "[RUN]" may be left out, "RUN..." is one or more.
    `hints` maps names that people type to the option that is meant, for suggestions only.
    Nothing is raised: every mistake is a line in `problems`, for the caller to raise at once.
    """
    options = options_of(sections)
    known = {option.name: option for option in options}
    known |= {option.full_name: option for option in options}
    found = Arguments({section: {} for section in sections}, [], [])
    tokens = deque(argv)
    while tokens:
        token = tokens.popleft()
        if not _is_option(token):
            found.positionals.append(token)
            continue
        name, has_value, given = token.removeprefix("--").partition("=")
        option = known.get(name) if token.startswith("--") else None
        meant = option or known.get(nearest(name, known, hints) or "")
        text = given if has_value or meant is None else _take_value(meant, tokens)
        if option is None:
            found.problems.append(_unknown(token.partition("=")[0], meant))
        else:
            _record(found, option, text)
    found.problems += _positional_problems(found.positionals, positionals)
    return found


def _is_option(token: str) -> bool:
    # "-5", "-" and "- item" are values; "--" and whatever has a letter after its dashes is not.
    return token.startswith("--") or re.match(r"-[A-Za-z_]", token) is not None


def _take_value(option: Option, tokens: deque[str]) -> str | None:
    """The value of `--name value`; "true" for a flag that stands alone; None if it is missing."""
    if option.annotation is bool:
        return tokens.popleft() if tokens and tokens[0].lower() in BOOLS else "true"
    return tokens.popleft() if tokens and not _is_option(tokens[0]) else None


def _record(found: Arguments, option: Option, text: str | None) -> None:
    name = option.full_name
    if text is None:
        found.problems.append(f"--{name} needs a value: --{name}=VALUE")
        return
    try:
        value = parse_value(option.annotation, text, name)
    except ValueError as error:
        found.problems.append(str(error))
        return
    section = found.values[option.section]
    if option.repeats:
        value = section.get(option.name, ()) + value
    elif section.get(option.name, value) != value:
        found.problems.append(f"--{name} is given twice, with different values: keep one")
    section[option.name] = value


def nearest(
    name: str, known: Mapping[str, Option], hints: Mapping[str, str] | None = None
) -> str | None:
    """The option that `name` most probably means, by its full name; None if nothing is close.

    A typing mistake seldom hits the first letter, so names that begin alike are enough with less in
    common; and `--theta` means the one option that has the word, `rope_theta`.
    """
    meant = {other: option.full_name for other, option in known.items()}
    meant |= {other: known[ours].full_name for other, ours in (hints or {}).items()}
    leaf = name.rpartition(".")[2].lower()
    alike = [other for other in meant if other[:1] == leaf[:1]]
    close = difflib.get_close_matches(leaf, alike, n=1, cutoff=0.75)
    close = close or difflib.get_close_matches(leaf, meant, n=1, cutoff=0.82)
    if close:
        return meant[close[0]]
    with_word = {full_name for other, full_name in meant.items() if leaf in other.split("_")}
    return with_word.pop() if len(with_word) == 1 else None


def _unknown(typed: str, meant: Option | None) -> str:
    advice = f"did you mean --{meant.full_name}?" if meant else "--help lists them all"
    return f"{typed} is not an option: {advice}"


def _positional_problems(given: Sequence[str], names: Sequence[str]) -> list[str]:
    needed = [name for name in names if not name.startswith("[")]
    problems = [f"{name} is missing" for name in needed[len(given) :]]
    if not any(name.rstrip("]").endswith("...") for name in names):
        for extra in given[len(names) :]:
            meant = f": did you mean --{extra}?" if re.match(r"[a-z_.]+=", extra) else ""
            problems.append(f"unexpected argument {extra!r}{meant}")
    return problems


def parse_options(
    argv: Sequence[str],
    section: type[Section],
    *,
    usage: str,
    positionals: Sequence[str] = (),
) -> tuple[Section, list[str]]:
    """A script's options and positional arguments; prints the help and exits 0 for `--help`.

    Raises ConfigError with every mistake at once, those of `section.problems()` included.
    """
    parsed, rest = parse_sections(argv, {"": section}, usage=usage, positionals=positionals)
    return parsed[""], rest


def parse_sections(
    argv: Sequence[str],
    sections: Mapping[str, type],
    *,
    usage: str,
    positionals: Sequence[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """As `parse_options`, for several sections: {section: instance} and positional arguments."""
    exit_for_help(argv, usage, sections)
    found = parse_arguments(argv, sections, positionals=positionals)
    parsed = {name: cls(**found.values[name]) for name, cls in sections.items()}
    problems = list(found.problems)
    for instance in parsed.values():
        problems += instance.problems() if hasattr(instance, "problems") else []
    if problems:
        raise ConfigError([*problems, f"usage: {usage}"])
    return parsed, found.positionals


# Values, from their annotation: int, float, bool, str, Literal, tuple[X, ...], None, unions


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


# Help


def exit_for_help(argv: Sequence[str], usage: str, sections: Mapping[str, type]) -> None:
    """Print the help and exit 0 if it is asked for, whatever else was typed."""
    if "--help" in argv or "-h" in argv:
        print_once(help_text(usage, sections))
        raise SystemExit(0)


def first_on_machine() -> bool:
    """Whether this process is the first rank of its machine, or no rank at all."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def print_once(text: str) -> None:
    """Print what all ranks of a machine have read from the same command line."""
    if first_on_machine():
        print(text)


def help_text(usage: str, sections: Mapping[str, type]) -> str:
    """Every option by section: how it is typed, one line about it, its default."""
    lines = [f"usage: {usage}"]
    section = None
    for option in options_of(sections):
        if option.section != section:
            section = option.section
            lines += ["", f"{section or 'options'}:"]
        typed = f"  --{option.name}={in_short(option.annotation)}"
        if len(typed) > 38:
            lines.append(typed)
            typed = ""
        lines.append(f"{typed:38}  {option.help} [{typed_text(option.default)}]")
    return "\n".join(lines)


def typed_text(value: Any) -> str:
    """A value as it would be typed; "" stands for itself."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value) or '""'
