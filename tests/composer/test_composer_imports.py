"""What importing the composer costs, and what it offers."""

from __future__ import annotations

import subprocess
import sys

from diloco_cloud import composer

LOADS_LITTLE = """
import sys
import diloco_cloud.composer as composer
assert "torch" not in sys.modules, "names are loaded when asked for"
composer.compose_loss, composer.build_batch, composer.fused_jsd_loss
loaded = {"trl", "transformers", "datasets", "accelerate"} & set(sys.modules)
assert not loaded, f"the losses need torch alone, not {loaded}"
"""


def test_losses_need_torch_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADS_LITTLE], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    for name in set(composer.__all__) - {"ComposerReplicationTrainer"}:
        assert getattr(composer, name).__name__ == name
