"""Decoders under atheris, which looks for bytes that take them where none took them before.

    pip install atheris
    python tests/exchange/fuzz_codecs.py -max_total_time=600 [CORPUS]

No test: it has no end of its own. It stops at bytes for which decode_anything fails and leaves them
in a file; given that file, it fails again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))
with atheris.instrument_imports(include=["diloco_cloud.exchange.codecs"]):
    import codec_hostile
    from codec_values import KINDS, values_of

    from diloco_cloud.exchange.codecs import codec_names, get_codec

    CODECS = [get_codec(name) for name in codec_names()]  # which imports each


def one_input(data: bytes) -> None:
    """Three bytes say which codec and how many values; the rest is the chunk."""
    if len(data) >= 3:
        numel = int.from_bytes(data[1:3], "little") % 9001
        codec_hostile.decode_anything(CODECS[data[0] % len(CODECS)], data[3:], numel)


def write_seeds(corpus: Path) -> None:
    """Valid chunks of every codec, to begin with."""
    corpus.mkdir(parents=True, exist_ok=True)
    for number, codec in enumerate(CODECS):
        for kind in KINDS:
            for numel in (1, 130, 4200):
                head = bytes([number]) + numel.to_bytes(2, "little")
                chunk = bytes(codec.encode(values_of(kind, numel)))
                (corpus / f"{codec.name} {kind} {numel}").write_bytes(head + chunk)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if not argument.startswith("-") and not Path(argument).is_file():
            write_seeds(Path(argument))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
