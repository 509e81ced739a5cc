"""Options as dataclass fields: `--name=value`, help and exit codes. Standard library only.

A section is a dataclass; its fields are the options, `name: Annotated[type, "one line"] = default`.
A section called "" has no prefix, so its options are typed by their own name alone. Options of a
training run say after the line how a resume treats them (training/resume.py).
"""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from data.values import BOOLS, in_short, parse_value

Section = TypeVar("Section")


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


# Help


def exit_for_help(argv: Sequence[str], usage: str, sections: Mapping[str, type]) -> None:
    """Print the help and exit 0 if it is asked for, whatever else was typed."""
    if "--help" in argv or "-h" in argv:
        print(help_text(usage, sections))
        raise SystemExit(0)


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
