"""Filter ``uv pip compile`` output into constraints.txt: `make constraints`.

Leaves out what differs between machines: local version suffixes (``torch==2.13.0+cpu``) and the
CUDA libraries, which torch pins by itself where it wants them.
"""

from __future__ import annotations

import re
import sys

HEADER = """\
# What `make demo`, `make test` and the images install: `pip install -c constraints.txt …`.
# Written by `make constraints` from pyproject.toml (extra `all` and group `dev`, Python 3.11).
"""
CUDA = re.compile(r"(nvidia-|cuda-|triton==)")


def main() -> None:
    pins = (line.strip() for line in sys.stdin)
    kept = [re.sub(r"\+\w+$", "", pin) for pin in pins if "==" in pin and not CUDA.match(pin)]
    if not kept:
        sys.exit("nothing was resolved")
    sys.stdout.write(HEADER + "".join(f"{pin}\n" for pin in sorted(kept)))


if __name__ == "__main__":
    main()
