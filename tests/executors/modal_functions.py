"""Functions of a user's own, as an App of theirs would have them; and what they run."""

from __future__ import annotations

from typing import Any

import modal

from diloco_cloud.executors.modal.container import run_replica
from diloco_cloud.executors.modal.image import own_modules

app = modal.App("my-app", include_source=False)
image = modal.Image.debian_slim().add_local_python_source("modal_functions", *own_modules())


@app.function(image=image, gpu="H100:4", timeout=3600)
def replica(rank: int, job: dict[str, Any]) -> Any:
    """What a user does with a replica is theirs to say."""
    arguments = job["arguments"]
    if "raises" in arguments:
        raise {"TimeoutError": TimeoutError, "ConnectionError": modal.exception.ConnectionError}[
            arguments["raises"]
        ]
    if arguments:
        return {"rank": rank, "arguments": arguments}
    return run_replica(rank, job)
