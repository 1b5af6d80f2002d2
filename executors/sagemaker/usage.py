"""What a training job is billed for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """What AWS bills for one replica.

    Attributes:
        instance_type: that it runs or ran on; None while that is not decided.
        training_s: seconds from the first container's start to the end; None before the end.
        billable_s: of those, what is paid for; less on spot instances.
        kept_s: seconds that its instance was kept warm afterwards, which are paid for, too.
    """

    instance_type: str | None
    training_s: int | None
    billable_s: int | None
    kept_s: int


def usage_of(description: Mapping[str, Any]) -> Usage:
    """The bill, from DescribeTrainingJob's answer."""
    resources = description.get("ResourceConfig", {})
    pool = description.get("WarmPoolStatus", {})
    return Usage(
        instance_type=resources.get("SelectedInstanceType") or resources.get("InstanceType"),
        training_s=description.get("TrainingTimeInSeconds"),
        billable_s=description.get("BillableTimeInSeconds"),
        kept_s=int(pool.get("ResourceRetainedBillableTimeInSeconds", 0)),
    )
