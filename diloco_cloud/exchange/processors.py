"""How fast a replica's processors encode, decode and average, as its own rounds show it.

Wall-clock rates: whatever else runs beside, such as training or other replicas on the same machine,
is in them, and will be in the next round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from diloco_cloud.exchange.links import Overlap, Span

#: What anybody may claim, bytes per second.
_SLOWEST: Final = 1e6
_FASTEST: Final = 1e12

#: Bytes of fp32 per second, before any are measured: encoded (with error feedback where there has
#: to be one), and added to a mean. A quarter of what one core does on its own
#: (benchmarks/results/codecs.json), as processors have other work, and a fleet has slower ones.
_ENCODE: Final = {
    "raw": 2.0e9,
    "bf16": 2.0e9,
    "int8": 1.0e9,
    "e3m0": 0.45e9,
    "e2m1": 0.8e9,
    "sparse": 0.18e9,
}
_DECODE: Final = {
    "raw": 4.5e9,
    "bf16": 3.5e9,
    "int8": 3.0e9,
    "e3m0": 1.6e9,
    "e2m1": 1.9e9,
    "sparse": 1.4e9,
}
#: Of a codec that nothing is known of.
_OTHER_ENCODE: Final = 0.2e9
_OTHER_DECODE: Final = 1.0e9


@dataclass(frozen=True)
class Rates:
    """Bytes of tensors per second.

    Attributes:
        encode: from tensors to a contribution that is ready to be sent.
        decode: of contributions checked and added to means, and of means put in their place.
    """

    encode: float
    decode: float

    @classmethod
    def claimed(cls, claims: list[tuple[float, float]], codec: str) -> Rates:
        """The slowest of each that anybody has measured, within reason.

        Args:
            claims: of encoding and decoding, by replica; 0 where it has measured nothing.
            codec: by name, for what nobody has measured.
        """
        encode = [min(max(one, _SLOWEST), _FASTEST) for one, _ in claims if one > 0]
        decode = [min(max(one, _SLOWEST), _FASTEST) for _, one in claims if one > 0]
        return cls(
            min(encode, default=_ENCODE.get(codec, _OTHER_ENCODE)),
            min(decode, default=_DECODE.get(codec, _OTHER_DECODE)),
        )


@dataclass
class ProcessorMeter:
    """Learns both rates from rounds, whose threads overlap. Any thread may report.

    Attributes:
        now: seconds, monotonic.
        kept: what part of the older rounds' weight is left after another round.
        overlap: of decoding with what is received.
    """

    now: Callable[[], float] = time.monotonic
    kept: float = 0.5
    overlap: Overlap = field(default_factory=Overlap)
    _encode: Span = field(default_factory=Span, init=False)
    _decode: Span = field(default_factory=Span, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @contextmanager
    def encoding(self, nbytes: int) -> Iterator[None]:
        """Around the encoding of so many bytes of tensors."""
        with self._work(self._encode, nbytes):
            yield

    @contextmanager
    def decoding(self, nbytes: int = 0) -> Iterator[None]:
        """Around the averaging of so many bytes of tensors; 0: checks, which go with it."""
        with self.overlap.averaging(), self._work(self._decode, nbytes):
            yield

    def end_round(self) -> None:
        """Let what was measured so far count for less."""
        with self._lock:
            self._encode.fade(self.kept)
            self._decode.fade(self.kept)

    @property
    def rates(self) -> tuple[float, float]:
        """Encoding and decoding, in bytes per second; 0 where nothing was measured yet."""
        with self._lock:
            return float(round(self._encode.rate() or 0)), float(round(self._decode.rate() or 0))

    @contextmanager
    def _work(self, span: Span, nbytes: int) -> Iterator[None]:
        with self._lock:
            span.begin(self.now())
        try:
            yield
        finally:
            with self._lock:
                span.end(self.now(), nbytes, 0.0)
