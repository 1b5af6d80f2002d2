"""The whole contract of an executor, as one class of tests."""

from __future__ import annotations

from diloco_cloud.testing.contract_ending import EndingContract
from diloco_cloud.testing.contract_handles import HandlesContract
from diloco_cloud.testing.contract_launching import LaunchingContract
from diloco_cloud.testing.contract_output import OutputContract


class ExecutorContract(LaunchingContract, EndingContract, HandlesContract, OutputContract):
    """Every rule of :mod:`diloco_cloud.executor`, against real replicas.

    A subclass overrides the fixture ``make_executor``, which returns a function that makes an
    executor; where they apply, the fixture ``outage`` (a context manager that cuts the provider
    off), the method ``unknown`` (a well-formed handle of nothing), and the attributes of
    :class:`~diloco_cloud.testing.contract_base.ContractBase`.

    The replicas run functions of :mod:`diloco_cloud.testing.programs`, so this package must be
    importable where they run.
    """
