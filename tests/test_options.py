"""Options: values by annotation, ranges, the command line and help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.options import (
    ABOVE_0,
    AT_LEAST_1_OR_NONE,
    FRACTION,
    ConfigError,
    conform,
    options_of,
    out_of_range,
    parse_arguments,
    parse_options,
    parse_sections,
    parse_value,
)


@dataclass(frozen=True)
class Paint:
    """A section with every kind of option."""

    colour: Annotated[str, "what it looks like"] = "red"
    layers: Annotated[int, "how many coats"] = 2
    gloss: Annotated[float, "how shiny"] = 0.5
    dry: Annotated[bool, "wait for it"] = False
    base: Annotated[Literal["oil", "water"], "what it is made of"] = "oil"
    a_very_long_name: Annotated[Literal["quite_long", "much_longer"], "wide"] = "quite_long"
    cores: Annotated[int | None, "how many painters"] = None
    size: Annotated[int | None | Literal["auto"], "how much at once"] = None
    tags: Annotated[tuple[str, ...], "labels"] = ()

    def problems(self) -> list[str]:
        return out_of_range(
            "", self, {"layers": ABOVE_0, "gloss": FRACTION, "cores": AT_LEAST_1_OR_NONE}
        )


def paint(*argv: str) -> Paint:
    return parse_options(argv, Paint, usage="paint [--name=value ...]")[0]


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        paint(*argv)
    return str(caught.value)


# Values

SIZE = int | None | Literal["auto"]
READ = [  # annotation, {typed text: value}
    (int, {"1000": 1000, "1_000": 1000, "1e3": 1000, "-5": -5, str(2**60 + 1): 2**60 + 1}),
    (float, {"1": 1.0, "3e-4": 0.0003, "-.5": -0.5}),
    (str, {"2024": "2024", "1e3": "1e3", "None": "None", "": ""}),
    (bool, dict.fromkeys(["true", "True", "TRUE", "1", "yes", "Yes"], True)),
    (bool, dict.fromkeys(["false", "False", "FALSE", "0", "no", "No"], False)),
    (Literal["oil", "water"], {"oil": "oil"}),
    (Literal[1, 2], {"2": 2}),
    (int | None, {"7": 7, "none": None, "Auto": None}),
    (Optional[int], {"none": None}),  # noqa: UP045
    (SIZE, {"auto": "auto", "none": None, "3": 3}),
    (tuple[str, ...], {"a,b": ("a,b",)}),
    (tuple[int, ...], {"1e3": (1000,)}),
]


@pytest.mark.parametrize(("annotation", "values"), READ)
def test_a_value_is_read_by_its_annotation(annotation, values):
    for text, value in values.items():
        read = parse_value(annotation, text, "x")
        assert read == value and type(read) is type(value), text


REFUSED = [  # annotation, what is allowed, typed texts
    (int, "a whole number (", ["1.5", "", "1e400", "nan", "true", "9" * 5000]),
    (int, "a whole number (", ["1e17"]),  # a float of this size is not exact
    (float, "a finite number (", ["x", "nan", "-inf", "1e999"]),
    (bool, "true or false", ["maybe", "", "2"]),
    (Literal["oil", "water"], "oil or water", ["Oil"]),
    (int | None, "a whole number (such as 1000 or 1e3) or none", ["nine"]),
    (SIZE, "a whole number (such as 1000 or 1e3) or none or auto", ["automatic"]),
    (tuple[int, ...], "a whole number (", ["a"]),
]


@pytest.mark.parametrize(("annotation", "allowed", "texts"), REFUSED)
def test_a_refused_value_is_named_with_what_is_allowed(annotation, allowed, texts):
    for text in texts:
        with pytest.raises(ValueError) as caught:
            parse_value(annotation, text, "some.option")
        assert str(caught.value).startswith(f"some.option={text}: must be {allowed}")


def test_a_refused_value_stays_on_one_line():
    with pytest.raises(ValueError, match=r"^x='two\\nlines': must be"):
        parse_value(int, "two\nlines", "x")


@given(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
def test_every_value_is_read_exactly(number, fraction, text):
    assert parse_value(int, str(number), "x") == number
    assert parse_value(float, repr(fraction), "x") == fraction
    assert parse_value(str, text, "x") == text


CONFORMED = [  # annotation, value in a config file or JSON, value of the option
    (float, 1, 1.0),
    (float | None, 2, 2.0),
    (int | None, None, None),
    (tuple[str, ...], ["a"], ("a",)),
    (Literal["a"], "a", "a"),
    (bool, True, True),
]


@pytest.mark.parametrize(("annotation", "value", "conformed"), CONFORMED)
def test_a_config_value_is_converted_to_its_declared_type(annotation, value, conformed):
    result = conform(annotation, value, "x")
    assert result == conformed and type(result) is type(conformed)


OTHER_TYPES = [  # annotation, values that are refused
    (int, [1.0, True, "1"]),
    (float, [True, "1", float("nan"), 10**400]),
    (bool, [0, "false"]),
    (str, [None, b"x"]),
    (Literal["a"], [["a"]]),
    (Literal[1], [True]),
    (int | None, ["none"]),
    (tuple[str, ...], ["ab", [1]]),
]


@pytest.mark.parametrize(("annotation", "values"), OTHER_TYPES)
def test_a_config_value_of_another_type_is_refused(annotation, values):
    for value in values:
        with pytest.raises(ValueError, match="^some.option=.*: must be "):
            conform(annotation, value, "some.option")


# The command line


def test_no_arguments_give_the_defaults():
    assert paint() == Paint()


@pytest.mark.parametrize("argv", [["--layers=3"], ["--layers", "3"], ["--layers=3", "--layers=3"]])
def test_a_value_follows_the_equals_sign_or_the_name(argv):
    assert paint(*argv).layers == 3


@pytest.mark.parametrize("text", ["a=b", "lr=3e-4", "=", "--x", "-1", "", "a b", "--help"])
def test_the_first_equals_sign_ends_the_name(text):
    assert paint(f"--colour={text}").colour == text


@pytest.mark.parametrize("text", ["-1", "-.5", "-", "- item"])
def test_a_separate_value_may_begin_with_a_dash_but_not_a_dash_and_a_letter(text):
    assert paint("--colour", text).colour == text


def test_a_flag_alone_is_true_and_takes_only_a_word_for_true_or_false():
    argv = ["--dry", "wall", "--layers=1"]
    options, rest = parse_options(argv, Paint, usage="u", positionals=["PLACE"])
    assert (options.dry, rest) == (True, ["wall"])
    assert paint("--dry").dry is True
    assert paint("--dry", "no", "--layers=1").dry is False


def test_a_repeatable_option_collects_in_order():
    assert paint("--tags=b", "--tags", "a", "--tags=b").tags == ("b", "a", "b")


def test_two_values_for_one_option_are_refused():
    assert "--layers is given twice" in refusal("--layers=3", "--layers=4")


@pytest.mark.parametrize("argv", [["--layers"], ["--layers", "--dry"], ["--layers", "-x"]])
def test_a_missing_value_is_reported(argv):
    assert "--layers needs a value: --layers=VALUE" in refusal(*argv)


@pytest.mark.parametrize("typed", ["--layer=3", "--layers_=3", "--Layers=3", "--paint.layers=3"])
def test_a_misspelled_option_is_refused_with_the_nearest(typed):
    name = typed.partition("=")[0]
    assert f"{name} is not an option: did you mean --layers?" in refusal(typed)


def test_a_misspelled_option_takes_its_value_along():
    assert refusal("--layer", "3").splitlines()[1:] == ["usage: paint [--name=value ...]"]


@pytest.mark.parametrize("typed", ["--zzzz", "--", "---", "--=3", "-x", "-layers=3"])
def test_an_option_like_no_other_is_refused_too(typed):
    assert " is not an option: " in refusal(typed)


@dataclass
class Run:
    out_dir: str = ""


def test_a_dash_in_place_of_an_underscore_gets_a_suggestion():
    arguments = parse_arguments(["--out-dir=x"], {"run": Run})
    assert arguments.problems == ["--out-dir is not an option: did you mean --run.out_dir?"]


def test_all_mistakes_are_reported_at_once():
    text = refusal("--layers=0", "--gloss=much", "--cores=0", "--bse=oil", "extra")
    assert text.splitlines() == [
        "gloss=much: must be a finite number (such as 0.1 or 3e-4)",
        "--bse is not an option: did you mean --base?",
        "unexpected argument 'extra'",
        "layers=0: must be above 0",
        "cores=0: must be at least 1 (or none)",
        "usage: paint [--name=value ...]",
    ]


def test_a_range_names_its_section_and_includes_its_ends():
    rules = {"gloss": FRACTION, "cores layers": AT_LEAST_1_OR_NONE}
    for gloss in (0.0, 1.0):
        assert not out_of_range("paint", Paint(gloss=gloss), rules)
    for gloss in (-0.1, 1.1):
        problem = f"paint.gloss={gloss}: must be in [0, 1]"
        assert out_of_range("paint", Paint(gloss=gloss), rules) == [problem]


@pytest.mark.parametrize(
    ("names", "given_", "problem"),
    [
        (["RUN"], [], "RUN is missing"),
        (["RUN"], ["a", "b"], "unexpected argument 'b'"),
        (["[RUN]"], [], None),
        (["[RUN]"], ["a"], None),
        (["RUN..."], [], "RUN... is missing"),
        (["RUN..."], ["a", "b", "c"], None),
        (["[RUN...]"], [], None),
        (["RUN", "OUT"], ["a"], "OUT is missing"),
        ([], ["-5"], "unexpected argument '-5'"),
        ([], ["lr=3"], "unexpected argument 'lr=3': did you mean --lr=3?"),
    ],
)
def test_positional_arguments_are_counted(names, given_, problem):
    problems = parse_arguments(given_, {"": Paint}, positionals=names).problems
    assert problems == ([problem] if problem else [])


def test_a_section_may_be_typed_or_left_out():
    sections = {"paint": Paint, "": Run}
    argv = ["--paint.layers=3", "--out_dir=2024", "--gloss=1"]
    parsed, _ = parse_sections(argv, sections, usage="u")
    assert parsed["paint"] == Paint(layers=3, gloss=1.0)
    assert parsed[""].out_dir == "2024"


@given(st.lists(st.text() | st.sampled_from(["--layers", "--dry", "--tags=", "--size=auto"])))
def test_any_command_line_gives_options_or_one_clear_error(argv):
    try:
        paint(*argv)
    except ConfigError as error:
        assert error.problems
    except SystemExit as stop:
        assert stop.code == 0
        assert "--help" in argv or "-h" in argv


# Help


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--layers=wrong", "--help"]])
def test_help_lists_every_option_with_type_default_and_one_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        paint(*argv)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in options_of({"": Paint}):
        # A long option has a line to itself.
        lines = text.partition(f"--{option.name}=")[2].splitlines()[:2]
        assert option.help in lines[option.name == "a_very_long_name"]
    assert "--cores=INT|none" in text
    assert "--base=oil|water" in text
    assert "how shiny [0.5]" in text
    assert "wait for it [false]" in text
