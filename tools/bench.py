"""Measure: `python -m tools.bench MODE [--name=value ...]`. Prints one table.

    data       preparation against the tokenizer library alone; the loader's share of a step
    compress   bits per byte of `xz -9` on the validation text, alone and given the training text

Every figure is a ratio within one run: machines differ, and are noisy.
"""

from __future__ import annotations

from data.options import ConfigError, run_command

MODES = {"data": "tools.bench_data", "compress": "tools.bench_compress"}


def main(argv: list[str]) -> int:
    """Run the mode that the first argument names."""
    usage = f"python -m tools.bench {'|'.join(MODES)} [--name=value ...]"
    if not argv or argv[0] not in MODES:
        if argv and argv[0] in ("--help", "-h"):
            print(f"usage: {usage}\n\n{__doc__}")
            return 0
        raise ConfigError(f"MODE={argv[0] if argv else ''}: one of {', '.join(MODES)}")
    from importlib import import_module

    return import_module(MODES[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    run_command(main)
