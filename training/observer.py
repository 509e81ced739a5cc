"""What rank 0 does for the reader beside the log: advice, snapshots at evaluations, the report.

Nothing here changes a weight or a random draw of training, and nothing that fails here stops it.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from cli.limits import usable_cores
from data.shards import Windows
from data.tokenizer import Tokenizer, prompt_ids
from model.config import SamplingConfig
from model.generate import generate
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from training.budget import UNFITTED
from training.config import Config
from training.console import Console
from training.dataset import Data
from training.device import Precision
from training.logger import RunLogger
from training.report.history import SNAPSHOTS, History
from training.report.page import try_report
from training.step import Setup

# Four things worth telling at once while a run goes on, each once, from what is logged anyway.

NEAR_GUESSING = 0.97  # of ln V: a model that has learned how frequent tokens are is below
SETTLED_STEPS = 20  # after the warm-up, before the loss is judged
MANY_EPOCHS = 4  # up to here repeated text is nearly as good as new (Muennighoff et al. 2023)
LONG_WAIT = 0.1  # of a step ...
WORTH_TELLING = 0.02  # ... and in seconds: a step of a millisecond waits for the scheduler
RISE = 0.005  # of the best validation loss: less is noise

Advice = tuple[str, str]  # what it is about, in a word, and the text


class Adviser:
    """Is shown every line of the log in turn (`see`) and says what is off, each thing once.

    It can be shown the lines of earlier attempts too: so a resumed run goes on where it was.
    """

    def __init__(self, config: Config, n_windows: int, vocab_size: int) -> None:
        """n_windows: of the training text. vocab_size: V, the ids that the text can have."""
        self.config, self.n_windows = config, n_windows
        self.guessing = math.log(vocab_size)
        self.said: set[str] = set()
        self.loss_sum, self.n_losses = 0.0, 0  # training's, since the last evaluation
        self.counted = 0, 0  # (step, targets so far) of the last line
        self.waits: list[float] = []  # the last shares of a step spent waiting for data
        self.evaluations: list[tuple[float, float]] = []  # (validation, training before it): three
        self.best = (math.inf, math.inf)  # the best of all
        self.has_learned = False  # the training loss was below that of guessing

    def see(self, entry: dict[str, Any], max_steps: int) -> list[Advice]:
        """What one more line of metrics.jsonl, of a run of `max_steps`, gives reason to say.

        Returns pairs of what it is about and the text. A line that has a note itself is remembered
        as said.
        """
        if "note" in entry:
            self.said.add(str(entry.get("about")))
            return []
        if "val_loss" in entry:
            found = self._overfitting(entry)
        else:
            found = [*self._guessing(entry, max_steps), *self._waiting(entry)]
            found += self._repeating(entry["step"])
        return self._first_time(found)

    def plan(self, max_steps: int) -> list[Advice]:
        """What the length of the run, known at its start, gives reason to say."""
        return self._first_time(self._repeating(max_steps))

    def _first_time(self, found: list[Advice]) -> list[Advice]:
        new = [(about, text) for about, text in found if about not in self.said]
        self.said |= {about for about, _ in found}
        return new

    def _guessing(self, entry: dict[str, Any], max_steps: int) -> list[Advice]:
        loss, step = entry.get("loss"), entry["step"]
        if loss is None:
            return []
        self.loss_sum, self.n_losses = self.loss_sum + loss, self.n_losses + 1
        first = max(max_steps / 10, self.config.schedule.warmup_steps + SETTLED_STEPS)
        if step < first or loss < NEAR_GUESSING * self.guessing or self.has_learned:
            return []
        return [
            (
                "guessing",
                f"the loss is {loss:.2f} after {step} steps, still that of guessing "
                f"(ln V = {self.guessing:.2f}): raise optim.lr={self.config.optim.lr:g}, or look "
                "at the data",
            )
        ]

    def _overfitting(self, entry: dict[str, Any]) -> list[Advice]:
        if entry["val_loss"] is None or not self.n_losses:
            return []
        training = self.loss_sum / self.n_losses
        self.loss_sum, self.n_losses = 0.0, 0
        self.has_learned = self.has_learned or training < NEAR_GUESSING * self.guessing
        self.evaluations = [*self.evaluations, (entry["val_loss"], training)][-3:]
        self.best = best = min(self.best, self.evaluations[-1])
        last_two = self.evaluations[-2:]
        rises = all(validation > (1 + RISE) * best[0] for validation, _ in last_two)
        falls = all(training < best[1] for _, training in last_two)
        if len(self.evaluations) < 3 or not rises or not falls:
            return []
        return [
            (
                "overfitting",
                f"validation has risen to {entry['val_loss']:.3f} (best {best[0]:.3f}) while the "
                "training loss falls: it learns the text by heart; use more text, fewer steps, "
                "a smaller model or model.dropout",
            )
        ]

    def _repeating(self, step: int) -> list[Advice]:
        epochs = step * self.config.data.global_batch / self.n_windows
        if epochs <= MANY_EPOCHS:
            return []
        return [
            (
                "repeating",
                f"{step} steps read the text {epochs:.1f} times; beyond {MANY_EPOCHS} times it "
                "teaches little more (Muennighoff et al. 2023): use more text or fewer steps",
            )
        ]

    def _tokens_per_step(self, entry: dict[str, Any]) -> float:
        """Targets that counted in a step since the line before; short documents do not fill one."""
        (last_step, last), step, tokens = self.counted, entry["step"], entry.get("tokens")
        if tokens is None or step <= last_step:
            return self.config.data.global_batch * self.config.model.context_length
        self.counted = step, tokens
        return (tokens - last) / (step - last_step)

    def _waiting(self, entry: dict[str, Any]) -> list[Advice]:
        share, speed = entry.get("data_wait"), entry.get("tokens_per_second")
        if share is None or not speed:
            return []
        seconds = share * self._tokens_per_step(entry) / speed
        self.waits = [*self.waits, share if seconds > WORTH_TELLING else 0.0][-3:]
        if len(self.waits) < 3 or min(self.waits) <= LONG_WAIT:  # a start or a hiccup is no matter
            return []
        mean = sum(self.waits) / 3
        return [
            (
                "waiting",
                f"{mean:.0%} of a step is spent waiting for data: is it on a slow disk, or are "
                "other processes using the cores?",
            )
        ]


# What a model says at an evaluation: its prompt continued, and a passage scored token by token.
#
# A line of snapshots.jsonl each time, for the report. No random number of training's is drawn.

PASSAGE_TOKENS = 160
LIKELIEST = 5


def sample_text(model: GPT, tokenizer: Tokenizer, prompt: str, *, seed: int, tokens: int) -> str:
    """The prompt continued, by a generator of its own, so that no training draw changes."""
    device = next(model.parameters()).device
    ids, first, skip = prompt_ids(tokenizer, prompt, model.config.vocab_size)
    rng = torch.Generator(device).manual_seed(seed)
    settings = SamplingConfig(temperature=0.8, top_k=50, max_new_tokens=tokens)
    new = generate(
        model,
        torch.tensor([ids], device=device),
        settings,
        rng,
        stop_ids=tokenizer.stop_ids,
        never=tokenizer.unused_ids(model.config.vocab_size),
        first_ids=first,
    )
    return prompt + tokenizer.decode([int(token) for token in new])[skip:]


@torch.no_grad()
def scored_passage(
    model: GPT, tokenizer: Tokenizer, windows: Windows, precision: Precision
) -> list[list[Any]]:
    """The first PASSAGE_TOKENS targets of the first window: [text, loss, [[text, chance], ...]].

    loss in nats, None where the target does not count; the LIKELIEST tokens come the likeliest
    first.
    """
    device = next(model.parameters()).device
    row = [torch.from_numpy(part)[:PASSAGE_TOKENS] for part in windows.pair(0)]
    tokens, targets, *documents = (part[None].to(device) for part in row)
    training = model.training
    model.eval()
    try:
        with precision.autocast():
            logits = model(tokens, None, *documents)  # (1, T, V)
    finally:
        model.train(training)
    log_chances = logits[0].float().log_softmax(-1).cpu()  # (T, V)
    V = log_chances.shape[1]
    unused = tokenizer.unused_ids(V)  # these ids stand for nothing: they are not shown
    log_chances[:, unused] = -torch.inf
    best = log_chances.topk(min(LIKELIEST, V - len(unused)))
    found = []
    for row, target in enumerate(targets[0].tolist()):
        if target == IGNORE_INDEX:
            break  # the document ends here
        loss = -log_chances[row, target].item()
        pairs = zip(best.indices[row].tolist(), best.values[row].exp().tolist(), strict=True)
        likeliest = [[token_text(tokenizer, token), round(p, 4)] for token, p in pairs]
        found.append([token_text(tokenizer, target), round(loss, 3), likeliest])
    return found


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself: its text, its bytes where they are no whole characters, or its name."""
    if token == tokenizer.eot:
        return "<end of text>"
    names = [text for text, special in tokenizer.special.items() if special == token]
    if names:
        return names[0]
    raw = tokenizer.decode_bytes([token])
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<{byte:02x}>" for byte in raw)


def append_snapshot(path: Path, entry: dict[str, Any]) -> None:
    """Add a line. A torn one before it, of a kill, is closed first."""
    with open(path, "ab") as file:
        file.write(b"\n" if file.tell() and not _ends_line(path) else b"")
        file.write(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


SAMPLE_TOKENS = 120  # of the sample at each evaluation


class Observer:
    """Follows one run: `begin`, then `logged` for every line of the log, `evaluated`."""

    def __init__(
        self,
        config: Config,
        setup: Setup,
        data: Data,
        logger: RunLogger,
        console: Console,
    ) -> None:
        self.config, self.setup, self.data, self.logger = config, setup, data, logger
        self.console = console
        self.folder = Path(config.run.out_dir)
        self.reports = config.log.report
        self.about_data = about_data(data)
        # Of the training text as a whole, so only about right for a single step.
        self.bytes_per_token: float = self.about_data["bytes per token"]
        self.adviser = Adviser(config, len(data.train), data.tokenizer.vocab_size)
        self.history = History(self.folder, config)
        for entry in self.history.read_metrics():  # of the attempts before
            if not entry.keys() & {"start", "fit"}:
                self.adviser.see(entry, config.run.max_steps)

    def begin(self, step: int, max_steps: int, argv: Sequence[str]) -> None:
        """Note that a process starts here, and with what."""
        start = {
            "command": command_line(argv, self.setup.ranks.world),
            "data": self.about_data,
            "environment": about_machine(self.config, self.setup),
        }
        self.logger.event(step, start=start)
        if max_steps != UNFITTED:
            self._advise(step, self.adviser.plan(max_steps))

    def logged(self, entry: dict[str, Any], max_steps: int) -> None:
        """A line of the log was written: is there something to say about it?"""
        self._advise(entry["step"], self.adviser.see(entry, max_steps))

    def evaluated(self, step: int) -> None:
        """Save a snapshot and update the report."""
        if not self.reports:
            return
        try:
            snapshot = self._snapshot(step)
            append_snapshot(self.folder / SNAPSHOTS, snapshot)
            self.logger.log_sample(step, snapshot["prompt"], snapshot["sample"])
        except Exception as error:  # out of memory, a full disk: training goes on
            reason = (str(error).splitlines() or [""])[0]
            self.console.print(f"note: no snapshot this time ({type(error).__name__}: {reason})")
        try_report(self.history, self.console.print)

    def _snapshot(self, step: int) -> dict[str, Any]:
        config, model, tokenizer = self.config, self.setup.model, self.data.tokenizer
        prompt, seed = config.log.sample_prompt, config.run.seed
        # Compiled, each length of the text would be compiled anew.
        eager = torch.compiler.set_stance("force_eager") if config.run.compile else nullcontext()
        with eager:
            text = sample_text(model, tokenizer, prompt, seed=seed, tokens=SAMPLE_TOKENS)
            val = self.data.val
            passage = scored_passage(model, tokenizer, val, self.setup.precision) if val else []
        return {
            "step": step,
            "attempt": self.logger.attempt,
            "prompt": prompt,
            "sample": text,
            "passage": passage,
        }

    def _advise(self, step: int, found: Iterable[Advice]) -> None:
        for about, text in found:
            self.console.print(f"advice: {text}")
            self.logger.event(step, note=text, about=about)


def command_line(argv: Sequence[str], world: int) -> str:
    """What to type to go on with this run: what was typed, but for --overwrite."""
    words = [word for word in argv if "overwrite" not in word.partition("=")[0]]
    launcher = f"torchrun --nproc_per_node={world}" if world > 1 else "python"
    return f"{launcher} train.py {shlex.join(words)}".rstrip()


def about_data(data: Data) -> dict[str, Any]:
    """The data in a few figures."""
    meta = data.meta
    tokens, n_bytes = meta.tokens["train"], meta.bytes["train"]
    return {
        "source": meta.source,
        "tokenizer": f"{meta.tokenizer}, {meta.vocab_size:,} ids",
        "tokens to train": tokens,
        "tokens to validate": meta.tokens["val"],
        "documents": sum(meta.documents.values()),
        "bytes per token": round(n_bytes / max(1, tokens), 3),
        "fingerprint": meta.fingerprint[:16],
    }


def about_machine(config: Config, setup: Setup) -> dict[str, Any]:
    """Where the run goes on, and how."""
    device = setup.ranks.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type}, {name}",
        "ranks": setup.ranks.world,
        "threads of a rank": torch.get_num_threads(),
        "cores": usable_cores(),
        "dtype": config.run.dtype,
        "compiled": setup.compiled,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "parameters": setup.model.parameter_count(),
    }
