"""Four things worth telling at once while a run goes on, each once, from what is logged anyway."""

from __future__ import annotations

import math
from typing import Any

from training.config import Config

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
