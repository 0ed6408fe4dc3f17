"""`vitral ARGUMENTS` under torchrun; rank KILL_RANK is killed at step KILL_STEP, on the first attempt only."""

import os
import signal
import sys

from vitral.cli.main import main
from vitral.training import loop

due = loop.due


def due_or_killed(config, state, last_save):
    place = (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], str(state.step))
    if place == ("0", os.environ["KILL_RANK"], os.environ["KILL_STEP"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return due(config, state, last_save)


if __name__ == "__main__":
    loop.due = due_or_killed
    sys.exit(main())
