"""Options as dataclass fields: `--name=value`, ranges, --help. Standard library only.

A section is a dataclass whose fields are the options: `name: Annotated[type, "help"] = default`. A
section called "" has no prefix. Options of a training run also say how a resumed run treats another
value, `Annotated[type, "help", "changed"]`: see training/resume.py.

This is not argparse, which stops at the first mistake and cannot tell `--flag word` from
`--name value`; collecting every mistake on top of it takes more code than the loop below.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Section = TypeVar("Section")


class ConfigError(ValueError):
    """A user's mistake, one line per problem: the name, the value, what is allowed, what to do.

    hints: lines on what to do about all of them, printed below, without "error:".
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str], hints: Sequence[str] = ()) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.hints = list(hints)
        super().__init__("\n".join([*self.problems, *self.hints]))


@dataclass(frozen=True)
class Option:
    """One field of one section."""

    section: str
    name: str
    annotation: Any
    help: str
    default: Any
    resume: str  # how a resumed run treats another value; "" if it is not a run's option

    @property
    def full_name(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name


def options_of(sections: Mapping[str, type]) -> list[Option]:
    """Return every option of these sections, in the order of the fields."""
    return [option for name, cls in sections.items() for option in _options_of(name, cls)]


@cache
def _options_of(section: str, cls: type) -> list[Option]:
    found = []
    hints = get_type_hints(cls, include_extras=True)  # slow, hence the cache
    for field in fields(cls):
        annotation, text, resume = hints[field.name], "", []
        if get_origin(annotation) is Annotated:
            annotation, text, *resume = get_args(annotation)
        default = field.default if field.default is not MISSING else None
        if field.default_factory is not MISSING:
            default = field.default_factory()
        found.append(Option(section, field.name, annotation, text, default, "".join(resume)))
    return found


# Values: int, float, bool, str, Literal, tuple[X, ...], None and unions of them

KINDS = {  # type -> (in messages, in --help)
    int: ("a whole number (such as 1000 or 1e3)", "INT"),
    float: ("a finite number (such as 0.1 or 3e-4)", "NUMBER"),
    bool: ("true or false", "true|false"),
    str: ("text", "TEXT"),
    type(None): ("none", "none"),
}
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_value(annotation: Any, text: str, name: str) -> Any:
    """Convert typed text to a value of `annotation`; `tuple[X, ...]` gives a tuple of one.

    "none" and "auto" give None where None is allowed. A str stays as it is, whatever it looks like.
    Raises ValueError with the name, the text and what is allowed.
    """
    try:
        return _convert(annotation, text, _from_text)
    except ValueError:
        typed = text if text.isprintable() else repr(text)
        raise ValueError(f"{name}={typed}: must be {in_words(annotation)}") from None


def conform(annotation: Any, value: Any, name: str) -> Any:
    """Convert a value from a config file or JSON to its declared type: 1 to 1.0, a list to a tuple.

    Raises ValueError with the name, the value and what is allowed.
    """
    try:
        return _convert(annotation, value, _from_value)
    except (ValueError, OverflowError):
        raise ValueError(f"{name}={value!r}: must be {in_words(annotation)}") from None


def _convert(annotation: Any, value: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """Look into unions, literals and tuples; `convert` handles the simple types."""
    members = get_args(annotation)
    if _is_union(annotation):
        # Literals first: in `int | None | Literal["auto"]` the word auto is a value of its own.
        for member in sorted(members, key=lambda member: not _is_literal(member)):
            with suppress(ValueError):
                return _convert(member, value, convert)
    elif _is_literal(annotation):
        for choice in members:
            with suppress(ValueError):
                if convert(type(choice), value) == choice:
                    return choice
    elif get_origin(annotation) is tuple:
        items = (value,) if convert is _from_text else value
        if isinstance(items, (list, tuple)):
            return tuple(_convert(members[0], item, convert) for item in items)
    else:
        return convert(annotation, value)
    raise ValueError(value)


def _from_text(kind: type, text: str) -> Any:
    word = text.strip().lower()
    if kind is str:
        return text
    if kind is bool and word in BOOLS:
        return BOOLS[word]
    if kind is type(None) and word in ("none", "auto"):
        return None
    if kind is int:
        with suppress(ValueError):
            return int(text)
        number = float(text)  # 1e3 is a whole number too; beyond 2**53 a float is not exact
        if number.is_integer() and abs(number) < 2**53:
            return int(number)
    if kind is float and math.isfinite(float(text)):
        return float(text)
    raise ValueError(text)


def _from_value(kind: type, value: Any) -> Any:
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind is not float and type(value) is kind:  # exactly: True is not an int
        return value
    raise ValueError(value)


def _is_literal(annotation: Any) -> bool:
    return get_origin(annotation) is Literal


def _is_union(annotation: Any) -> bool:
    # `int | None` and `Union[int, None]` have different origins before Python 3.14.
    origin = get_origin(annotation)
    return origin is Union or getattr(origin, "__name__", "") == "UnionType"


def in_words(annotation: Any) -> str:
    """Say what is allowed, for messages: "auto or float32"."""
    return _spell(annotation, 0, " or ")


def in_short(annotation: Any) -> str:
    """Say what is allowed, for --help and tables: "INT|none"."""
    return _spell(annotation, 1, "|")


def _spell(annotation: Any, form: int, between: str) -> str:
    members = get_args(annotation)
    if _is_literal(annotation):
        return between.join(map(str, members))
    if get_origin(annotation) is tuple:
        return _spell(members[0], form, between) + " (may be repeated)"
    if _is_union(annotation):
        return between.join(_spell(member, form, between) for member in members)
    return KINDS[annotation][form]


def typed_text(value: Any) -> str:
    """Write a value as it would be typed; an empty text as ""."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value) or '""'


# Types and ranges, for the `problems()` of a section


def wrong_types(section: str, config: Any) -> list[str]:
    """Return one line per field whose value is not of its declared type."""
    found = []
    kind: type = type(config)
    for option in _options_of(section, kind):
        try:
            conform(option.annotation, getattr(config, option.name), option.full_name)
        except ValueError as error:
            found.append(str(error))
    return found


Rule = tuple[str, Callable[[Any], object]]  # what is allowed, and the test of it

ABOVE_0: Rule = ("above 0", lambda value: value > 0)
AT_LEAST_0: Rule = ("at least 0", lambda value: value >= 0)
AT_LEAST_1: Rule = ("at least 1", lambda value: value >= 1)
AT_LEAST_1_OR_NONE: Rule = ("at least 1 (or none)", lambda value: value is None or value >= 1)
AT_LEAST_2: Rule = ("at least 2", lambda value: value >= 2)
BELOW_1: Rule = ("in [0, 1)", lambda value: 0 <= value < 1)
FRACTION: Rule = ("in [0, 1]", lambda value: 0 <= value <= 1)
SEED: Rule = ("in [0, 2**63)", lambda value: 0 <= value < 2**63)


def out_of_range(section: str, config: Any, rules: Mapping[str, Rule]) -> list[str]:
    """Return one line per field that breaks its rule; a key of `rules` names one or more fields."""
    prefix = f"{section}." if section else ""
    return [
        f"{prefix}{name}={value}: must be {allowed}"
        for names, (allowed, is_right) in rules.items()
        for name in names.split()
        if not is_right(value := getattr(config, name))
    ]


# The command line


@dataclass
class Arguments:
    """A parsed command line: {section: {name: value}}, the other arguments, and all mistakes."""

    values: dict[str, dict[str, Any]]
    positionals: list[str]
    problems: list[str]


def parse_arguments(
    argv: Sequence[str],
    sections: Mapping[str, type],
    *,
    positionals: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
) -> Arguments:
    """Parse `--section.name=value`, `--name=value`, `--name value` and `--flag`.

    `positionals` names the other arguments: "RUN" is required, "[RUN]" optional, "RUN..." one or
    more. `hints` maps names that people type to the option they mean ("": none), for suggestions.
    Nothing is raised: every mistake is a line in `problems`, to be raised together.
    """
    options = options_of(sections)
    known = {name: option for option in options for name in (option.name, option.full_name)}
    found = Arguments({section: {} for section in sections}, [], [])
    tokens = deque(argv)
    while tokens:
        token = tokens.popleft()
        if not _is_option(token):
            found.positionals.append(token)
            continue
        typed, equals, text = token.partition("=")
        name = typed.removeprefix("--")
        option = known.get(name) if typed.startswith("--") else None
        # A misspelled option takes its value along, which would otherwise be reported, too.
        meant = option or known.get(nearest(name, known, hints) or "")
        value = text if equals else _take_value(meant, tokens)
        if option:
            _record(found, option, value)
        else:
            advice = f"did you mean --{meant.full_name}?" if meant else "--help lists them all"
            found.problems.append(f"{typed} is not an option: {advice}")
    found.problems += _positional_problems(found.positionals, positionals)
    return found


def _is_option(token: str) -> bool:
    # "-5", "-" and "- item" are values; "--..." and a dash with a letter after it are not.
    return token.startswith("--") or re.match(r"-[A-Za-z_]", token) is not None


def _take_value(option: Option | None, tokens: deque[str]) -> str | None:
    """Take the value of `--name value`: "true" for a flag that stands alone, None if missing."""
    if option and option.annotation is bool:
        return tokens.popleft() if tokens and tokens[0].lower() in BOOLS else "true"
    return tokens.popleft() if option and tokens and not _is_option(tokens[0]) else None


def _record(found: Arguments, option: Option, text: str | None) -> None:
    name, section = option.full_name, found.values[option.section]
    if text is None:
        found.problems.append(f"--{name} needs a value: --{name}=VALUE")
        return
    try:
        value = parse_value(option.annotation, text, name)
    except ValueError as error:
        found.problems.append(str(error))
        return
    if isinstance(value, tuple):
        value = section.get(option.name, ()) + value
    elif section.get(option.name, value) != value:
        found.problems.append(f"--{name} is given twice with different values: keep one")
    section[option.name] = value


def nearest(
    name: str, known: Mapping[str, Option], hints: Mapping[str, str] | None = None
) -> str | None:
    """Return the full name of the option that `name` most likely means; None if nothing is close.

    Typing mistakes seldom hit the first letter, so names that begin alike need less in common.
    `--theta` means the only option that contains the word, `rope_theta`.
    """
    meant: dict[str, str | None] = {other: option.full_name for other, option in known.items()}
    meant |= {
        other: known[ours].full_name if ours else None for other, ours in (hints or {}).items()
    }
    leaf = name.rpartition(".")[2].lower()
    alike = [other for other in meant if other[:1] == leaf[:1]]
    close = difflib.get_close_matches(leaf, alike, n=1, cutoff=0.75)
    close = close or difflib.get_close_matches(leaf, meant, n=1, cutoff=0.82)
    if close:
        return meant[close[0]]
    with_word = {full_name for other, full_name in meant.items() if leaf in other.split("_")}
    return with_word.pop() if len(with_word) == 1 else None


def _positional_problems(given: Sequence[str], names: Sequence[str]) -> list[str]:
    required = [name for name in names if not name.startswith("[")]
    problems = [f"{name} is missing" for name in required[len(given) :]]
    if not any(name.rstrip("]").endswith("...") for name in names):
        for extra in given[len(names) :]:
            meant = f": did you mean --{extra}?" if re.match(r"[a-z_.]+=", extra) else ""
            problems.append(f"unexpected argument {extra!r}{meant}")
    return problems


def parse_options(
    argv: Sequence[str], section: type[Section], *, usage: str, positionals: Sequence[str] = ()
) -> tuple[Section, list[str]]:
    """Return a script's options and its other arguments; for `--help`, print it and exit 0.

    Raises ConfigError with all mistakes at once, those of `section.problems()` included.
    """
    parsed, rest = parse_sections(argv, {"": section}, usage=usage, positionals=positionals)
    return parsed[""], rest


def parse_sections(
    argv: Sequence[str],
    sections: Mapping[str, type],
    *,
    usage: str,
    positionals: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """As `parse_options`, for several sections: {section: instance} and the other arguments."""
    exit_for_help(argv, usage, sections)
    found = parse_arguments(argv, sections, positionals=positionals, hints=hints)
    parsed = {name: cls(**found.values[name]) for name, cls in sections.items()}
    problems = list(found.problems)
    for instance in parsed.values():
        problems += instance.problems() if hasattr(instance, "problems") else []
    if problems:
        raise ConfigError(problems, [f"usage: {usage}"])
    return parsed, found.positionals


# Help


def exit_for_help(argv: Sequence[str], usage: str, sections: Mapping[str, type]) -> None:
    """Print the help and exit 0 if argv asks for it, whatever else it holds."""
    if "--help" in argv or "-h" in argv:
        print_once(help_text(usage, sections))
        raise SystemExit(0)


def first_on_machine() -> bool:
    """Return whether this process is its machine's first rank, or not a rank at all."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def print_once(text: str) -> None:
    """Print from the first rank of a machine only: all of them parse the same command line."""
    if first_on_machine():
        print(text)


def help_text(usage: str, sections: Mapping[str, type]) -> str:
    """List every option by section: what to type, its help, its default."""
    lines, section = [f"usage: {usage}"], None
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
