"""Running code as another kind of CPU would."""

from __future__ import annotations

import os
import subprocess
import sys


def output_on(capability: str, code: str, *args: str) -> str:
    """What ``code`` prints where torch takes the CPU for one of this ATen capability."""
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
