"""How a training's process ends: with all that ``sys.exit`` does but the interpreter's own end, when threads may still run."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, threading, time
from megatron.pipeline.distributed.processes import leave

class Held:
    def __del__(self):
        print("the interpreter ended", flush=True)

held = Held()
held.itself = held  # as hooks of a model hold it
atexit.register(print, "files are closed")
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("trained", end=", ")
leave(3)
"""


def test_what_threads_may_still_hold_is_left_to_the_system() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "trained, files are closed\n", "")
