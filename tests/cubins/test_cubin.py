"""The file form of a cubin."""

import dataclasses
import hashlib
import json

import pytest

from jax_fa4.cubins import BadCubinError, Cubin
from jax_fa4.cubins.cubin import FORMAT_VERSION, read_metadata


def test_a_file_gives_back_the_cubin(cubin):
    assert Cubin.from_bytes(cubin.to_bytes()) == cubin


def test_the_ptx_is_kept(cubin):
    assert ".entry kernel_forward_bfloat16(" in Cubin.from_bytes(cubin.to_bytes()).ptx


def test_equal_cubins_have_equal_files(cubin):
    assert dataclasses.replace(cubin).to_bytes() == cubin.to_bytes()


def test_no_byte_can_change_unnoticed(cubin):
    data = cubin.to_bytes()
    for position in range(len(data)):
        damaged = data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]
        with pytest.raises(BadCubinError):
            Cubin.from_bytes(damaged)


def test_no_part_can_be_cut_off_or_added(cubin):
    data = cubin.to_bytes()
    for length in range(len(data)):
        with pytest.raises(BadCubinError):
            Cubin.from_bytes(data[:length])
    with pytest.raises(BadCubinError, match=f"has {len(data) + 1} bytes, its header promises {len(data)}"):
        Cubin.from_bytes(data + b"\0")


def test_another_format_version_is_named(cubin):
    data = bytearray(cubin.to_bytes())
    data[8] = FORMAT_VERSION + 1
    with pytest.raises(BadCubinError, match=f"version {FORMAT_VERSION + 1}, this is version {FORMAT_VERSION}"):
        Cubin.from_bytes(bytes(data))


@pytest.mark.parametrize("change", [{"params": None}, {"params": [{}]}, {"warps": 4}], ids=str)
def test_metadata_of_another_version_is_no_cubin(cubin, change):
    whole = cubin.to_bytes()
    size = int.from_bytes(whole[12:16], "little")
    metadata = json.dumps({**json.loads(whole[32 : 32 + size]), **change}).encode()
    body = whole[:12] + len(metadata).to_bytes(4, "little") + whole[16:32] + metadata + whole[32 + size : -32]
    with pytest.raises(BadCubinError, match="its metadata is that of another version"):
        Cubin.from_bytes(body + hashlib.sha256(body).digest())


def test_a_listing_reads_the_metadata_alone(cubin):
    beginning = cubin.to_bytes()[: -len(cubin.image) - 32]
    assert read_metadata(beginning)["config"] == cubin.config


@pytest.mark.parametrize(
    "metadata", [b"{", b"[]", b"{}", b"\xff", b'{"key": 1}', b"[" * 9999], ids=lambda m: repr(m[:9])
)
def test_a_listing_survives_any_metadata(cubin, metadata):
    header = bytearray(cubin.to_bytes()[:32])
    header[12:16] = len(metadata).to_bytes(4, "little")
    with pytest.raises(BadCubinError):
        read_metadata(bytes(header) + metadata)


def test_the_key_is_not_hidden_by_megabytes(cubin):
    assert cubin.key in repr(cubin)
    assert "image" not in repr(cubin)
