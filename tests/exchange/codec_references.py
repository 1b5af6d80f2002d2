"""The codecs again, one value at a time in plain Python: slow, and obvious."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

E3M0 = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 128
_SPARSE_BLOCK = 4096


def fp32(value: float) -> float:
    """Round to the nearest fp32."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def from_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _blocks(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


# -- bf16 ------------------------------------------------------------------------------------------


def bf16_encode(values: Sequence[float]) -> bytes:
    out = b""
    for value in values:
        upper, lower = divmod(bits_of(value), 2**16)
        if math.isnan(value):
            upper = 0x7FC0
        elif lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1):
            upper += 1
        out += struct.pack("<H", upper)
    return out


def bf16_decode(data: bytes) -> list[float]:
    return [from_bits(upper * 2**16) for (upper,) in struct.iter_unpack("<H", data)]


# -- int8, e3m0, e2m1 ------------------------------------------------------------------------------


def _scale(block: Sequence[float], top: float) -> int:
    """Upper half of the scale's bits."""
    if not all(map(math.isfinite, block)):
        return 0x7FC0
    largest = max(map(abs, block))
    if largest < 2.0**-100:
        return 0
    return -(-bits_of(fp32(min(largest, 2.0**127) / top)) // 2**16)


def _quotients(values: Sequence[float], top: float, gain: float = 1.0) -> tuple[bytes, list[float]]:
    scales, quotients = b"", []
    for block in _blocks(values, _BLOCK):
        upper = _scale(block, top)
        scale = from_bits(upper * 2**16)
        if gain != 1 and not math.isnan(scale):
            upper = (bits_of(fp32(scale * gain)) + 2**15) // 2**16
        scales += struct.pack("<H", upper)
        usable = scale > 0
        quotients += [max(-top, min(top, fp32(v / scale))) if usable else 0.0 for v in block]
    return scales, quotients


def _times_scales(levels: Sequence[float], scales: bytes) -> list[float]:
    found: list[float] = []
    for block, upper in zip(_blocks(levels, _BLOCK), struct.iter_unpack("<H", scales), strict=True):
        found += [fp32(level * from_bits(upper[0] * 2**16)) for level in block]
    return found


def int8_encode(values: Sequence[float]) -> bytes:
    scales, quotients = _quotients(values, 127.0)
    return scales + b"".join(struct.pack("<b", round(q)) for q in quotients)


def int8_decode(data: bytes, numel: int) -> list[float]:
    start = len(data) - numel
    return _times_scales(
        [float(b[0]) for b in struct.iter_unpack("<b", data[start:])], data[:start]
    )


def _nearest(quotient: float, magnitudes: Sequence[float]) -> int:
    # Of two that are equally near, the larger.
    return min(range(8), key=lambda code: (abs(abs(quotient) - magnitudes[code]), -code))


def fourbit_encode(magnitudes: Sequence[float], gain: float) -> Callable[[Sequence[float]], bytes]:
    def encode(values: Sequence[float]) -> bytes:
        scales, quotients = _quotients(values, magnitudes[-1], gain)
        codes = []
        for quotient in quotients:
            code = _nearest(quotient, magnitudes)
            codes.append(code + 8 if quotient < 0 and code else code)
        if len(codes) % 2:
            codes.append(0)
        pairs = zip(codes[::2], codes[1::2], strict=True)
        return scales + bytes(low + 16 * high for low, high in pairs)

    return encode


def fourbit_decode(magnitudes: Sequence[float]) -> Callable[[bytes, int], list[float]]:
    def decode(data: bytes, numel: int) -> list[float]:
        start = len(data) - (numel + 1) // 2
        codes = [code for byte in data[start:] for code in (byte % 16, byte // 16)][:numel]
        levels = [-magnitudes[c - 8] if c >= 8 else magnitudes[c] for c in codes]
        return _times_scales(levels, data[:start])

    return decode


# -- sparse ----------------------------------------------------------------------------------------


def _step(scale: int) -> float:
    """A block's scale: the nearest fp32 to a power of the eighth root of 1/2."""
    return fp32(2.0 ** (-(scale % 8) / 8)) * 2.0 ** -(scale // 8)


def _largest(block: Sequence[float], keep: int) -> list[int]:
    order = sorted(range(len(block)), key=lambda i: (-abs(block[i]), i))
    count = -(-keep * len(block) // _SPARSE_BLOCK)
    return sorted(i for i in order[:count] if abs(block[i]) >= 2.0**-100)


def _two_means(units: Sequence[float]) -> tuple[float, float]:
    rising = sorted(units)
    sums, total = [], 0.0
    for value in rising:
        total += value
        sums.append(total)
    if len(rising) == 1:
        return total, total
    best, answer = -math.inf, (0.0, 0.0)
    for below in range(1, len(rising)):
        left, above = sums[below - 1], len(rising) - below
        right = total - left
        quality = left * (left / below) + right * (right / above)
        if quality > best:
            best, answer = quality, (left / below, right / above)
    return answer


def _magnitude(level: float, scale: int) -> float:
    return fp32(fp32(level * _step(scale % 8)) * 2.0 ** -(scale // 8))


def sparse_encode(values: Sequence[float], keep: int = 64) -> bytes:
    """For finite values."""
    blocks = _blocks(values, _SPARSE_BLOCK)
    kept = [
        (b * _SPARSE_BLOCK + i, blocks[b][i])
        for b in range(len(blocks))
        for i in _largest(blocks[b], keep)
    ]
    scales, low, high = [0] * len(blocks), 0.0, 0.0
    units: list[float] = []
    if kept:
        means: dict[int, float] = {}
        for b in sorted({at // _SPARSE_BLOCK for at, _ in kept}):
            total, count = 0.0, 0
            for at, value in kept:
                if at // _SPARSE_BLOCK == b:
                    total, count = total + abs(value), count + 1
            means[b] = total / count
        top = max(means.values())
        for b, mean in means.items():
            halves = [(_step(s) + _step(s + 1)) / 2 * top for s in range(255)]
            scales[b] = sum(mean < half for half in halves)
        units = [abs(v) / _step(scales[at // _SPARSE_BLOCK]) for at, v in kept]
        low, high = _two_means(units)
    most = fp32((2 - 2.0**-23) * 2.0**127)
    written = fp32(min(low, most)), fp32(min(high, most))
    sent = []
    for (at, value), unit in zip(kept, units, strict=True):
        is_high = unit >= (low + high) / 2
        if abs(value) >= _magnitude(written[is_high], scales[at // _SPARSE_BLOCK]) / 2:
            sent.append((at, value, is_high))
    return (
        struct.pack("<ff", *written)
        + bytes(scales)
        + _set([at for at, _, _ in sent], len(values))
        + _plane("".join("1" if value < 0 else "0" for _, value, _ in sent))
        + _set([i for i, (_, _, is_high) in enumerate(sent) if is_high], len(sent))
    )


def _plane(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))


def _set(places: Sequence[int], numel: int) -> bytes:
    divisor = min(max(numel * 45426 // (max(len(places), 1) * 2**16), 1), 65535)
    width = int(math.log2(divisor))
    short = 2 ** (width + 1) - divisor
    first, more, unary, before = "", "", "", -1
    for place in places:
        quotient, remainder = divmod(place - before - 1, divisor)
        before = place
        unary += "0" * quotient + "1"
        if remainder < short:
            first += format(remainder, f"0{width}b") if width else ""
        else:
            code = format(remainder + short, f"0{width + 1}b")
            first, more = first + code[:-1], more + code[-1]
    last = _plane(unary)
    head = struct.pack("<III", len(places), divisor, len(last))
    return head + _plane(first) + _plane(more) + last


class _Bits:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def plane(self, count: int) -> str:
        return "".join(format(b, "08b") for b in self.take(-(-count // 8)))[:count]

    def set(self) -> list[int]:
        count, divisor, last = struct.unpack("<III", self.take(12))
        width = int(math.log2(divisor))
        short = 2 ** (width + 1) - divisor
        first = self.plane(count * width)
        heads = [int(first[i * width : (i + 1) * width] or "0", 2) for i in range(count)]
        more = iter(self.plane(sum(h >= short for h in heads)))
        remainders = [h if h < short else 2 * h + int(next(more)) - short for h in heads]
        unary = "".join(format(b, "08b") for b in self.take(last))
        quotients = [len(zeros) for zeros in unary.split("1")]
        places, before = [], -1
        for quotient, remainder in zip(quotients, remainders, strict=False):
            before += 1 + quotient * divisor + remainder
            places.append(before)
        return places


def sparse_decode(data: bytes, numel: int) -> list[float]:
    bits = _Bits(data)
    levels = struct.unpack("<ff", bits.take(8))
    scales = bits.take(-(-numel // _SPARSE_BLOCK))
    positions = bits.set()
    negative = bits.plane(len(positions))
    high = set(bits.set())
    values = [0.0] * numel
    for i, at in enumerate(positions):
        magnitude = _magnitude(levels[i in high], scales[at // _SPARSE_BLOCK])
        values[at] = -magnitude if negative[i] == "1" else magnitude
    return values


ENCODE: dict[str, Callable[[Sequence[float]], bytes]] = {
    "fp32": lambda values: struct.pack(f"<{len(values)}f", *values),
    "bf16": bf16_encode,
    "int8": int8_encode,
    "e3m0": fourbit_encode(E3M0, 33 / 32),
    "e2m1": fourbit_encode(E2M1, 129 / 128),
    "sparse": sparse_encode,
}
DECODE: dict[str, Callable[[bytes, int], list[float]]] = {
    "fp32": lambda data, numel: list(struct.unpack(f"<{numel}f", data)),
    "bf16": lambda data, _: bf16_decode(data),
    "int8": int8_decode,
    "e3m0": fourbit_decode(E3M0),
    "e2m1": fourbit_decode(E2M1),
    "sparse": sparse_decode,
}
