"""Show what a config will cost, before it runs: `python -m tools.plan CONFIG`.

Parameters, FLOPs, memory per rank, time on GPUs and the module tree. Nothing is trained and no data
is prepared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cli.command import run_command
from cli.options import ConfigError, help_text, options_of, parse_options
from training.choose import load_or_choose
from training.config import SECTIONS, Config, with_values

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from data.meta import Meta
    from model.gpt import GPT

USAGE = "python -m tools.plan CONFIG [--name=value ...], for example: python -m tools.plan small"
COMPUTE_OPTIMAL = 20  # tokens per parameter (Hoffmann et al. 2022, "Chinchilla")

# GPUs of training.device.PEAKS to show, with their memory in GB.
GPUS = {
    "B200": 180,
    "H200": 141,
    "H100": 80,
    "A100": 80,
    "L40S": 48,
    "RTX 4090": 24,
    "RTX 3090": 24,
    "A10": 24,
    "L4": 24,
    "V100": 32,
    "T4": 16,
}
DRIVER_BYTES = 0.6e9  # a CUDA context with its kernels


@dataclass(frozen=True)
class PlanOptions:
    """Assumptions about the machines."""

    ranks: Annotated[int | None, "ranks to plan for; torchrun's number if set, else 1 and 8"] = None
    mfu: Annotated[float, "fraction of the hardware's peak that training reaches"] = 0.4

    def problems(self) -> list[str]:
        found = []
        if self.ranks is not None and self.ranks < 1:
            found.append(f"ranks={self.ranks}: must be at least 1")
        if not 0 < self.mfu <= 1:
            found.append(f"mfu={self.mfu}: must be in (0, 1]")
        return found


def main(argv: list[str]) -> int:
    """Print the plan."""
    options, rest = take_options(argv)
    config, notes = with_weights(load_or_choose(rest, usage=USAGE))
    vocab_size, meta, note = vocabulary(config)
    config = replace(config, model=config.model.resolved(vocab_size))
    worlds = [options.ranks] if options.ranks else [w for w in (1, 8) if spreads(config, w)]
    if options.ranks and not spreads(config, options.ranks):
        raise ConfigError(
            f"ranks={options.ranks}: {config.data.global_batch} windows in micro-batches of "
            f"{config.data.micro_batch or 1} do not spread evenly over them; choose another "
            "--global_batch or --micro_batch"
        )

    import torch

    from training.network import new_network

    with torch.device("meta"):  # shapes, but no values
        model = new_network(config.model, replace(config.run, attention="sdpa"), seed=None)
    blocks = [
        head_lines(config, model, meta, [*notes, note] if note else notes),
        parameter_lines(config, model),
        memory_lines(config, worlds),
        time_lines(config, model, options.ranks or 1, options.mfu),
        tree_lines(model),
    ]
    print("\n\n".join("\n".join(lines) for lines in blocks))
    return 0


def take_options(argv: list[str]) -> tuple[PlanOptions, list[str]]:
    """Return the planner's own options and the other words, which are options of train.py.

    --help prints the help of both and exits 0.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(USAGE, {"plan": PlanOptions, **SECTIONS}))
        raise SystemExit(0)
    names = {option.name for option in options_of({"": PlanOptions})}
    own: list[str] = []
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        mine = word.startswith("--") and word[2:].partition("=")[0] in names
        (own if mine else rest).append(word)
        if mine and "=" not in word and words:
            own.append(words.pop(0))
    return parse_options(own, PlanOptions, usage=USAGE)[0], rest


def with_weights(config: Config) -> tuple[Config, list[str]]:
    """Return the config with the shape of the weights it starts from, and notes.

    Nothing is downloaded.
    """
    source = config.run.init_from
    if source and not Path(source).exists():
        return config, [f"run.init_from={source}: not here; the shape is the config's"]
    from training.inherit import inherit_model

    notes: list[str] = []
    return inherit_model(config, notes.append), notes


def vocabulary(config: Config) -> tuple[int, Meta | None, str]:
    """Return the vocabulary size, the prepared data's description, and a note on a guessed size."""
    from data.config import TIKTOKEN_SIZES
    from data.meta import read_meta
    from data.prepare import prepared_folder

    try:
        meta = read_meta(prepared_folder(config.data, read=False))
        return meta.vocab_size, meta, ""
    except (ConfigError, OSError):
        pass  # not prepared, or the source is not there
    name = config.data.tokenizer
    if name.startswith("bpe:"):
        return int(name.split(":")[1]), None, ""
    sizes = {"byte": 257, **TIKTOKEN_SIZES}
    if name in sizes:
        return sizes[name], None, ""
    if name.startswith(("hf:", "run:")):
        from data.tokenizer import ready_tokenizer

        ready = ready_tokenizer(name)
        assert ready is not None  # it is not made from the text
        return ready.vocab_size, None, ""
    size = config.model.vocab_size or 128
    return size, None, f"vocabulary of {size} assumed; the size is known once the data is prepared"


def spreads(config: Config, world: int) -> bool:
    """Return whether `world` ranks get an equal number of micro-batches each, at least 1."""
    micro = config.data.micro_batch
    return config.data.global_batch % (world * (micro if isinstance(micro, int) else 1)) == 0


def on_ranks(config: Config, world: int, device: str) -> Config:
    """Return the config as `world` ranks on this kind of device would resolve it."""
    import torch

    from training.device import pick_dtype

    micro = config.data.micro_batch
    if not isinstance(micro, int):
        micro = max(1, config.data.global_batch // world)
    dtype: str = config.run.dtype
    if dtype == "auto" and device == "cuda":
        dtype = "bfloat16"  # the GPU itself may not be here to be asked
    elif dtype == "auto":
        dtype, _ = pick_dtype("auto", torch.device(device), config.model.d_model)
    reduction = config.parallel.reduction
    if reduction == "auto":
        reduction = "exact" if device == "cpu" else "fast"
    values = {"data.micro_batch": micro, "run.dtype": dtype, "parallel.reduction": reduction}
    return with_values(config, values)


# The blocks of the output


def head_lines(config: Config, model: GPT, meta: Meta | None, notes: list[str]) -> list[str]:
    """Describe size, length and the ratio of the two."""
    n, T, steps = config.data.global_batch, config.model.context_length, config.run.max_steps
    count = model.parameter_count()
    tokens = run_tokens(config)
    lines = [
        f"{count:,} parameters, {steps:,} steps of {n} x {T} = {n * T:,} tokens: {tokens:,} tokens",
        f"{tokens / count:.2f} tokens per parameter; compute-optimal is about {COMPUTE_OPTIMAL} "
        f"(Hoffmann et al. 2022): {COMPUTE_OPTIMAL * count / (n * T):,.0f} steps",
    ]
    if meta is not None:
        epochs = tokens / max(1, meta.tokens["train"])
        lines.append(f"{epochs:.2f} epochs of {meta.tokens['train']:,} training tokens")
    else:
        lines.append("epochs: known once the data is prepared (python -m data.prepare)")
    return [*lines, *notes]


def parameter_lines(config: Config, model: GPT) -> list[str]:
    """Count parameters by part, and FLOPs per token."""
    from model.inspect import parameters_by_part

    parts = parameters_by_part(model)
    total = sum(parts.values())
    lines = ["parameters"]
    for name, count in parts.items():
        if name == "head" and config.model.tie_embeddings:
            lines.append(f"  {name:<12}{'tied':>16}")
        elif count:
            lines.append(f"  {name:<12}{count:>16,}{count / total:>8.1%}")
    flops = model.flops_per_token(config.model.context_length)
    run = flops * run_tokens(config)
    lines.append(f"  {'total':<12}{total:>16,}")
    if config.run.lora_rank:
        trained = sum(p.numel() for p in model.trained_parameters().values())
        lines.append(f"  {'trained':<12}{trained:>16,}{trained / total:>8.1%}  (LoRA)")
    return [
        *lines,
        f"FLOPs: {flops:,} per token, forward and backward; {run:.3g} for the run",
    ]


def memory_lines(config: Config, worlds: list[int]) -> list[str]:
    """Tabulate memory per rank, in MB, for each number of ranks on this machine's device."""
    import torch

    from training.memory import RUNTIME, estimate_memory

    device = "cuda" if config.run.device.startswith("cuda") else "cpu"
    if config.run.device == "auto" and torch.cuda.is_available():
        device = "cuda"
    plans = [on_ranks(config, world, device) for world in worlds]
    memories = [
        estimate_memory(plan, world, device) for plan, world in zip(plans, worlds, strict=True)
    ]
    titles = [f"{world} rank{'s' * (world > 1)}" for world in worlds]
    rows = [
        [name, *(f"{getattr(memory, name) / 1e6:,.0f}" for memory in memories)]
        for name in vars(memories[0])
    ]
    rows.append(["(micro_batch)", *(str(plan.data.micro_batch) for plan in plans)])
    head = f"{'memory per rank, MB':<22}" + "".join(f"{title:>12}" for title in titles)
    return [
        f"{head}    ({device}, {plans[0].run.dtype})",
        *(f"  {name:<20}" + "".join(f"{value:>12}" for value in values) for name, *values in rows),
        "  the rows do not add up to the peak: activations are freed as gradients appear, and",
        f"  a process on a CPU needs about {RUNTIME / 1e6:.0f} MB besides",
    ]


def time_lines(config: Config, model: GPT, ranks: int, mfu: float) -> list[str]:
    """Tabulate the duration of the run on `ranks` of each known GPU, and on this CPU."""
    import torch

    from cli.terminal import clock_text
    from training.device import PEAKS, measured_peak
    from training.memory import estimate_memory

    work = run_tokens(config) * model.flops_per_token(config.model.context_length)
    resolved = on_ranks(config, ranks, "cuda")
    memory = estimate_memory(resolved, ranks, "cuda")
    single = resolved.run.dtype == "float32"
    old = "" if single else "; V100 and T4: float16"
    lines = [f"time on {ranks} of these at {mfu:.0%} of the peak ({resolved.run.dtype}{old})"]
    for name, gigabytes in GPUS.items():
        peak = PEAKS[name][single]
        seconds = training_seconds(work, peak, mfu, ranks)
        fits = memory.peak + DRIVER_BYTES < gigabytes * 1e9
        lacks = "" if fits else f"   needs {memory.peak / 1e9:.0f} GB: lower micro_batch"
        lines.append(f"  {name:<12}{peak / 1e12:>8,.0f} TFLOP/s{clock_text(seconds):>14}{lacks}")
    cpu = on_ranks(config, 1, "cpu").run.dtype
    peak = measured_peak(torch.device("cpu"), getattr(torch, cpu), size=768)
    seconds = training_seconds(work, peak, mfu, 1)
    measured = f"{peak / 1e12:>8.2f} TFLOP/s{clock_text(seconds):>14}   measured, {cpu}"
    return [*lines, f"  {'this CPU':<12}{measured}"]


def run_tokens(config: Config) -> int:
    """Return the tokens of the whole run; a token counts every time it is seen."""
    return config.run.max_steps * config.data.global_batch * config.model.context_length


def training_seconds(flops: float, peak: float, mfu: float, ranks: int) -> float:
    """Return the duration of `flops` on `ranks` devices of `peak` FLOP/s."""
    return flops / (peak * mfu * ranks)


def tree_lines(model: GPT) -> list[str]:
    """List the modules with shapes, parameters and FLOPs; equal layers once."""
    from model.inspect import module_rows

    lines = [f"{'module':<34}{'shape':>14}{'parameters':>16}{'MFLOP/token':>14}"]
    for row in module_rows(model):
        count = f"{row.parameters:,}" if row.parameters else ""
        flops = f"{row.flops / 1e6:,.3f}" if row.flops else ""
        name = "  " * row.depth + row.name
        lines.append(f"{name:<34}{row.shape:>14}{count:>16}{flops:>14}".rstrip())
    return lines


if __name__ == "__main__":
    run_command(main)
