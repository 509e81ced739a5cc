"""A training under torchrun, one rank of which is killed once: RANK STEP, then train.py's line."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

    from faultlib import around_steps

    import training.run
    from cli.command import run_command
    from train import main

    victim, at = int(sys.argv.pop(1)), int(sys.argv.pop(1))

    def dying(state, setup) -> None:
        first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first_attempt and (setup.ranks.rank, state.step) == (victim, at):
            os.kill(os.getpid(), signal.SIGKILL)

    training.run.take_step = around_steps(before=dying)
    run_command(main)
