"""Four pieces of advice, given while a run trains, from what it logs anyway."""

from __future__ import annotations

import math
from typing import Any

from training.config import Config

NEAR_GUESSING = 0.97  # of ln V: a model that has learned how frequent tokens are is below it
SETTLED_STEPS = 20  # after the warmup, before the loss is judged
MANY_EPOCHS = 4  # up to 4, repeated text is nearly as good as new (Muennighoff et al. 2023)
LONG_WAIT = 0.1  # of a step ...
NOTICEABLE = 0.02  # ... and in seconds: for a step of a millisecond it is only the scheduler
RISE = 0.005  # of the best validation loss: less is noise

Advice = tuple[str, str]  # topic in one word, text


class Adviser:
    """Sees every line of metrics.jsonl in turn and returns advice, each topic once per run.

    Shown the lines of earlier attempts first, it continues where they ended.
    """

    def __init__(self, config: Config, n_windows: int, vocab_size: int) -> None:
        """n_windows: in the training text. vocab_size: V, ids that can occur in the text."""
        self.config, self.n_windows = config, n_windows
        self.guessing = math.log(vocab_size)  # loss of a uniform guess, in nats
        self.given: set[str] = set()  # topics
        self.losses: list[float] = []  # of training, since the last evaluation
        self.counted = 0, 0  # (step, targets so far) of the last line
        self.waits: list[float] = []  # shares of a step spent waiting for data: last three lines
        self.evaluations: list[tuple[float, float]] = []  # (validation, training): last two
        self.best = (math.inf, math.inf)  # evaluation
        self.has_learned = False  # the training loss was once below a guess

    def see(self, entry: dict[str, Any], max_steps: int) -> list[Advice]:
        """Take in one line of the log of a run of `max_steps`; return new advice.

        A line that holds earlier advice marks its topic as given.
        """
        if "note" in entry:
            self.given.add(str(entry.get("about")))
            return []
        if "val_loss" in entry:
            return self._new(self._overfitting(entry))
        guessing, waiting = self._guessing(entry, max_steps), self._waiting(entry)
        return self._new(guessing, waiting, self._repeating(entry["step"]))

    def plan(self, max_steps: int) -> list[Advice]:
        """Advice that follows from the length of the run alone."""
        return self._new(self._repeating(max_steps))

    def _new(self, *found: Advice | None) -> list[Advice]:
        new = [advice for advice in found if advice is not None and advice[0] not in self.given]
        self.given |= {topic for topic, _ in new}
        return new

    def _guessing(self, entry: dict[str, Any], max_steps: int) -> Advice | None:
        loss, step = entry.get("loss"), entry["step"]
        if loss is None:
            return None
        self.losses.append(loss)
        first = max(max_steps / 10, self.config.schedule.warmup_steps + SETTLED_STEPS)
        if step < first or loss < NEAR_GUESSING * self.guessing or self.has_learned:
            return None
        return (
            "guessing",
            f"after {step} steps the loss is {loss:.2f}, no better than random guessing "
            f"(ln V = {self.guessing:.2f}): raise optim.lr={self.config.optim.lr:g}, or check "
            "the data",
        )

    def _overfitting(self, entry: dict[str, Any]) -> Advice | None:
        """Twice in a row validation is worse than at the best evaluation, and training better."""
        if entry["val_loss"] is None or not self.losses:
            return None
        training = sum(self.losses) / len(self.losses)
        self.losses = []
        self.has_learned = self.has_learned or training < NEAR_GUESSING * self.guessing
        self.evaluations = [*self.evaluations, (entry["val_loss"], training)][-2:]
        self.best = best = min(self.best, self.evaluations[-1])
        rises = all(validation > (1 + RISE) * best[0] for validation, _ in self.evaluations)
        falls = all(training < best[1] for _, training in self.evaluations)
        if not rises or not falls:
            return None
        return (
            "overfitting",
            f"the validation loss has risen to {entry['val_loss']:.3f} (best {best[0]:.3f}) while "
            "the training loss falls: the model is overfitting; use more text, fewer steps, a "
            "smaller model or model.dropout",
        )

    def _repeating(self, step: int) -> Advice | None:
        epochs = step * self.config.data.global_batch / self.n_windows
        if epochs <= MANY_EPOCHS:
            return None
        return (
            "repeating",
            f"{step} steps are {epochs:.1f} epochs; text repeated more than {MANY_EPOCHS} times "
            "teaches little more (Muennighoff et al. 2023): use more text or fewer steps",
        )

    def _waiting(self, entry: dict[str, Any]) -> Advice | None:
        share, speed = entry.get("data_wait"), entry.get("tokens_per_second")
        if share is None or not speed:
            return None
        seconds = share * self._tokens_per_step(entry) / speed
        self.waits = [*self.waits, share if seconds > NOTICEABLE else 0.0][-3:]
        if len(self.waits) < 3 or min(self.waits) <= LONG_WAIT:  # ignore a start or a hiccup
            return None
        return (
            "waiting",
            f"{sum(self.waits) / 3:.0%} of each step is spent waiting for data: is it on a slow "
            "disk, or are other processes using the cores?",
        )

    def _tokens_per_step(self, entry: dict[str, Any]) -> float:
        """Targets per step since the line before; short documents do not fill their windows."""
        (last_step, last), step, tokens = self.counted, entry["step"], entry.get("tokens")
        if tokens is None or step <= last_step:
            return self.config.data.global_batch * self.config.model.context_length
        self.counted = step, tokens
        return (tokens - last) / (step - last_step)
