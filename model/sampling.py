"""How the next id is chosen, as plain data: no torch, like config.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class SamplingConfig:
    """How the next id is chosen. The defaults draw from the model's own distribution."""

    temperature: Annotated[float, "0: always the likeliest; 1: the model's own odds"] = 1.0
    top_k: Annotated[int, "draw among the k likeliest (0: all)"] = 0
    top_p: Annotated[float, "draw among the likeliest that together hold this probability"] = 1.0
    min_p: Annotated[float, "drop what is less likely than this times the likeliest"] = 0.0
    repetition_penalty: Annotated[float, "above 1: what was said becomes less likely"] = 1.0
    max_new_tokens: Annotated[int, "how many tokens to add at most"] = 200

    def problems(self) -> list[str]:
        """Everything wrong with these values, in plain words."""
        found = []
        # The bounds of temperature and penalty keep float32's division from overflowing.
        if self.temperature != 0.0 and not 1e-6 <= self.temperature <= 1e6:
            found.append(f"temperature={self.temperature}: must be 0 (greedy) or in [1e-6, 1e6]")
        if self.top_k < 0:
            found.append(f"top_k={self.top_k}: must be 0 (off) or above")
        if not 0.0 < self.top_p <= 1.0:
            found.append(f"top_p={self.top_p}: must be in (0, 1]; 1 is off")
        if not 0.0 <= self.min_p <= 1.0:
            found.append(f"min_p={self.min_p}: must be in [0, 1]; 0 is off")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            penalty = self.repetition_penalty
            found.append(f"repetition_penalty={penalty}: must be in [0.01, 100]; 1 is off")
        if self.max_new_tokens < 1:
            found.append(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        return found
