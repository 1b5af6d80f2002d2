"""What the composer's channels 2 and 3 can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco_cloud.composer.losses import divergences
from diloco_cloud.composer.losses.checks import finite, positive, require, unit_interval

SDPOWrapper = Literal["none", "taid", "entropy_opd"]
EntropyMode = Literal["soft", "paper"]
DPOVariant = Literal["dpo", "simpo"]


@dataclass(frozen=True)
class SDPOOptions:
    """What channel 2 minimises between the student's and the teacher's distribution of a token.

    Change one field with :func:`dataclasses.replace`, such as ``taid_t`` before each step.

    Attributes:
        jsd_beta: 0 forward KL, 0.5 symmetric JSD, 1 reverse KL. For ``wrapper="none"``.
        temperature: of both softmaxes. For ``"none"`` and ``"entropy_opd"``.
        token_clip: the most one token may add to the loss, in nats; a token above it has no
            gradient. None for no ceiling.
        wrapper: ``"none"`` for the generalised JSD, ``"taid"``, or ``"entropy_opd"``.
        taid_t: TAID's interpolation, in [0, 1]; required by ``"taid"``, and for nothing else.
        entropy_opd_h_max: entropy in nats at which the soft gate is all forward KL; None for
            log V.
        entropy_opd_mode: ``"soft"`` mixes by entropy, ``"paper"`` adds a forward KL above a
            threshold (:func:`~diloco_cloud.composer.losses.entropy_aware_opd_loss`).

    Raises:
        ConfigError: a value out of its range (of a wrapper that is not chosen, too), an unknown
            wrapper or mode, TAID without ``t``, or ``t`` without TAID.
    """

    jsd_beta: float = 0.5
    temperature: float = 1.0
    token_clip: float | None = None
    wrapper: SDPOWrapper = "none"
    taid_t: float | None = None
    entropy_opd_h_max: float | None = None
    entropy_opd_mode: EntropyMode = "soft"

    def __post_init__(self) -> None:
        require(
            self.wrapper in ("none", "taid", "entropy_opd"),
            f"sdpo_wrapper is {self.wrapper!r}",
            fix="Use 'none', 'taid' or 'entropy_opd'.",
        )
        require(
            self.wrapper != "taid" or self.taid_t is not None,
            "sdpo_wrapper='taid' needs taid_t",
            fix="Pass the interpolation of this step, such as TAIDScheduler(...).t.",
        )
        require(
            self.wrapper == "taid" or self.taid_t is None,
            f"taid_t is {self.taid_t}, and sdpo_wrapper={self.wrapper!r} does not read it",
            fix="Set sdpo_wrapper='taid', or leave taid_t out.",
        )
        require(
            self.entropy_opd_mode in ("soft", "paper"),
            f"entropy_opd_mode is {self.entropy_opd_mode!r}",
            fix="Use 'soft' or 'paper'.",
        )
        unit_interval(self.jsd_beta, "sdpo_jsd_beta")
        positive(self.temperature, "sdpo_temperature")
        for value, name in (
            (self.token_clip, "sdpo_token_clip"),
            (self.entropy_opd_h_max, "entropy_opd_h_max"),
        ):
            if value is not None:
                positive(value, name)
        if self.taid_t is not None:
            unit_interval(self.taid_t, "taid_t")

    def kernel(self) -> divergences.Kernel:
        """The divergence of one token, as the row-wise driver runs it."""
        if self.wrapper == "taid":
            assert self.taid_t is not None
            return divergences.taid(float(self.taid_t))
        if self.wrapper == "entropy_opd":
            return divergences.entropy_aware(self.entropy_opd_mode, h_max=self.entropy_opd_h_max)
        return divergences.generalized_jsd(self.jsd_beta)

    @property
    def softmax_temperature(self) -> float:
        """The temperature in force: TAID has none."""
        return 1.0 if self.wrapper == "taid" else self.temperature


@dataclass(frozen=True)
class ReplayOptions:
    """What channel 3 minimises over preference pairs.

    Attributes:
        variant: ``"dpo"``, which needs reference log-probabilities, or ``"simpo"``, which
            ignores them.
        dpo_beta: DPO's inverse temperature.
        simpo_beta: SimPO's scale.
        simpo_gamma: SimPO's target margin.

    Raises:
        ConfigError: an unknown variant, or a value out of its range.
    """

    variant: DPOVariant = "dpo"
    dpo_beta: float = 0.1
    simpo_beta: float = 2.0
    simpo_gamma: float = 1.0

    def __post_init__(self) -> None:
        require(
            self.variant in ("dpo", "simpo"),
            f"dpo_variant is {self.variant!r}",
            fix="Use 'dpo' or 'simpo'.",
        )
        positive(self.dpo_beta, "replay_dpo_beta")
        positive(self.simpo_beta, "simpo_beta")
        finite(self.simpo_gamma, "simpo_gamma")
