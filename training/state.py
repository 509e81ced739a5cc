"""Every number, besides tensors, that can change a later update."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from cli.options import conform

# What torch's GradScaler calls its state.
SCALER = {
    "scale": float,
    "growth_factor": float,
    "backoff_factor": float,
    "growth_interval": int,
    "_growth_tracker": int,
}


@dataclass
class TrainState:
    """The state of a run after an update; saved as state.json."""

    step: int = 0  # updates done
    best_loss: float | None = None
    best_step: int | None = None
    since_best: int = 0  # evaluations
    evaluated_at: int | None = None  # the last step that was evaluated
    last_val_loss: float | None = None
    skipped: int = 0  # float16 steps
    tokens: int | None = 0  # targets trained on; None: the run began before they were counted
    scaler: dict[str, Any] = field(default_factory=dict)
    wandb_id: str | None = None
    seconds: float = 0.0  # of a time budget that are used
    fits: tuple[tuple[int, ...], ...] = ()  # of the budget: (step, max_steps from there on)

    def record(self, val_loss: float) -> bool:
        """Note an evaluation at this step; True if it is the best so far."""
        self.evaluated_at, self.last_val_loss = self.step, val_loss
        if self.best_loss is None or val_loss < self.best_loss:
            self.best_loss, self.best_step, self.since_best = val_loss, self.step, 0
            return True
        self.since_best += 1
        return False


def state_from_json(saved: Any) -> TrainState:
    """The state that a state.json holds. A number newer than the file has its default.

    Raises ValueError that names what is unknown, of a wrong type or out of range.
    """
    if not isinstance(saved, dict):
        raise ValueError("must be an object")
    unknown = saved.keys() - {f.name for f in fields(TrainState)}
    if unknown:
        raise ValueError(f"unknown {', '.join(sorted(map(repr, unknown)))}")
    types, values = get_type_hints(TrainState), {"tokens": None, **saved}
    scaler = values.pop("scaler", {})
    values = {name: conform(types[name], value, name) for name, value in values.items()}
    state = TrainState(**values, scaler=_scaler_from_json(scaler))
    counts = (state.step, state.since_best, state.skipped, state.best_step or 0, state.tokens or 0)
    if min(counts) < 0 or max(counts) >= 1 << 62:
        raise ValueError("a count is out of range")
    bad_fits = [fit for fit in state.fits if len(fit) != 2 or not 0 <= fit[0] <= fit[1] < 1 << 62]
    if bad_fits or state.seconds < 0:
        raise ValueError("the time budget's numbers are out of range")
    return state


def _scaler_from_json(saved: Any) -> dict[str, Any]:
    if saved == {}:  # no float16
        return {}
    if not isinstance(saved, dict) or saved.keys() != SCALER.keys():
        raise ValueError(f"scaler must hold {', '.join(SCALER)}")
    values = {name: conform(SCALER[name], value, f"scaler.{name}") for name, value in saved.items()}
    if not 0 < values["scale"] < 2.0**128:  # a float32 above 0
        raise ValueError(f"scaler.scale={values['scale']} is out of range")
    return values
