"""One kernel binary with all that is needed to launch it, and its form as a file.

magic 8 | format version u32 | metadata bytes u32 | ptx bytes u64 | image bytes u64
metadata (JSON) | PTX (zlib) | image (ELF) | SHA-256 of everything before it      little-endian
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zlib
from typing import Any, Literal

__all__ = ["FORMAT_VERSION", "BadCubinError", "Cubin", "Param", "read_metadata"]

MAGIC = b"JAXFA4\r\n"  # a text-mode copy changes it
FORMAT_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ")
_MAX_METADATA = 1 << 20  # bytes; a real one has about 2000
_LISTED = ("key", "recipe", "dsl_version", "arch", "config", "entry")
_DIGEST_BYTES = hashlib.sha256().digest_size


class BadCubinError(ValueError):
    """A file that must not be run: damaged, of another version, from somebody else. The message says what is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Param:
    """One parameter of a kernel, as its PTX declares it."""

    name: str
    size: int  # bytes
    align: int  # bytes
    kind: Literal["tensor_map", "pointer", "bytes"]
    pointee_align: int = 1  # bytes: what the kernel assumes of the address in a pointer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cubin:
    """A kernel binary. `key` names it everywhere: in the cache, in launch plans and in the C++ library."""

    key: str  # 64 hex digits: recipe and DSL version
    recipe: str  # 64 hex digits: kernel sources, config and architecture
    dsl_version: str
    arch: str
    config: str  # repr of the config it was compiled from
    entry: str
    smem_bytes: int  # dynamic shared memory of a launch
    threads: int  # in a CTA
    params: tuple[Param, ...]
    image: bytes = dataclasses.field(repr=False)
    ptx_zlib: bytes = dataclasses.field(repr=False)

    @property
    def ptx(self) -> str:
        """The PTX that `image` was assembled from."""
        return zlib.decompress(self.ptx_zlib).decode()

    def to_bytes(self) -> bytes:
        """The content of the file `<key>.cubin`."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.repr}
        record["params"] = [dataclasses.asdict(p) for p in self.params]
        metadata = json.dumps(record, sort_keys=True).encode()
        sizes = len(metadata), len(self.ptx_zlib), len(self.image)
        body = _HEADER.pack(MAGIC, FORMAT_VERSION, *sizes) + metadata + self.ptx_zlib + self.image
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Cubin:
        """Inverse of `to_bytes`. Raises BadCubinError unless every byte is as it was written."""
        metadata_size, ptx_size, image_size = _sizes(data)
        ptx_start = _HEADER.size + metadata_size
        image_start = ptx_start + ptx_size
        end = image_start + image_size
        if len(data) != end + _DIGEST_BYTES:
            raise BadCubinError(f"it has {len(data)} bytes, its header promises {end + _DIGEST_BYTES}")
        if hashlib.sha256(memoryview(data)[:end]).digest() != data[end:]:
            raise BadCubinError("its checksum does not match")
        fields = read_metadata(data)
        try:
            fields["params"] = tuple(Param(**p) for p in fields["params"])
            return cls(**fields, ptx_zlib=data[ptx_start:image_start], image=data[image_start:end])
        except (KeyError, TypeError) as e:
            raise BadCubinError(f"its metadata is that of another version: {e}") from None


def read_metadata(data: bytes) -> dict[str, Any]:
    """Metadata from the first bytes of a file, unverified: good for finding and listing, not for launching.

    Raises BadCubinError where even the metadata can't be read.
    """
    metadata_size, _, _ = _sizes(data)
    try:
        record = json.loads(data[_HEADER.size : _HEADER.size + metadata_size])
    except (ValueError, RecursionError) as e:
        raise BadCubinError(f"its metadata is no JSON: {e}") from None
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in _LISTED):
        raise BadCubinError(f"its metadata lacks one of {', '.join(_LISTED)}")
    return record


def _sizes(data: bytes) -> tuple[int, int, int]:
    """Sizes of metadata, PTX and image, from a header that is ours and of this version."""
    if len(data) < _HEADER.size:
        raise BadCubinError(f"it has {len(data)} bytes, its header alone takes {_HEADER.size}")
    magic, version, metadata_size, ptx_size, image_size = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise BadCubinError("it is no cubin file of jax_fa4")
    if version != FORMAT_VERSION:
        raise BadCubinError(f"it has format version {version}, this is version {FORMAT_VERSION}")
    if metadata_size > _MAX_METADATA:
        raise BadCubinError(f"its header promises {metadata_size} bytes of metadata")
    return metadata_size, ptx_size, image_size
