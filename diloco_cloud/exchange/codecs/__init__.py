"""How the values of a contribution become fewer bytes, and values again.

    codec = get_codec("int8")
    data = codec.encode(values)              # of one chunk
    codec.decode(data, values.numel())       # the same bits on every machine

A codec works chunk by chunk: what it makes of one is decoded without the others, so that shards and
ranged reads cut a contribution where they like. Importing this package costs no torch; using a
codec does.
"""

from __future__ import annotations

from diloco_cloud.codec_registry import codec_names, get_codec, require_codec

__all__ = ["codec_names", "get_codec", "require_codec"]
