"""Sections of codec ``raw`` as numpy arrays and back, without a copy (requirement KC-4, decision W8).

Protocol section "KV Block Container". In ``kvsp-layout-1`` a section holds token count x kv_heads x
head_dim elements, token slowest and dimension fastest, little endian. K is kept after positional encoding,
rotary pairs in half-split order (dimension d with d + head_dim / 2), V as computed: an engine that keeps K
otherwise converts at its border.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from kvsp_core.container_header import ContainerError
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.problems import INCOMPATIBLE
from kvsp_core.registries import LAYOUT_1

__all__ = ["Array", "element_dtype", "section_array", "section_octets"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""A numpy array of shape (tokens, kv_heads, head_dim)."""


def element_dtype(descriptor: CompatibilityDescriptor) -> np.dtype[Any]:
    """Return the numpy type of a descriptor's elements, by ml_dtypes for bf16 and the 8-bit types.

    Raises `LocalProtocolError` where numpy has none of that name, or where the layout is not
    ``kvsp-layout-1``.
    """
    if descriptor.layout != LAYOUT_1:
        raise LocalProtocolError(f"layout: only {LAYOUT_1!r} can be viewed, found {descriptor.layout!r}")
    name = descriptor.registries.element_types[descriptor.kv_dtype].dtype
    try:
        return np.dtype(getattr(ml_dtypes, name, name)).newbyteorder("<")
    except TypeError:
        raise LocalProtocolError(f"kv_dtype: numpy has no type {name!r}; register one it knows") from None


def section_array(section: bytes | bytearray | memoryview, descriptor: CompatibilityDescriptor) -> Array:
    """Return a K or V section as an array of shape (tokens, kv_heads, head_dim), over the same memory.

    The array is read-only where the memory is. Raises `ContainerError` (kvsp-incompatible) where the
    section does not have the size of a block.
    """
    dtype = element_dtype(descriptor)
    found, expected = memoryview(section).nbytes, descriptor.section_bytes(descriptor.block_tokens)
    if found != expected:
        raise ContainerError(
            INCOMPATIBLE, f"a section has {found} octets, the descriptor gives it {expected}"
        )
    shape = (descriptor.block_tokens, descriptor.kv_heads, descriptor.head_dim)
    return np.frombuffer(section, dtype=dtype).reshape(shape)


def section_octets(array: Array, descriptor: CompatibilityDescriptor) -> memoryview:
    """Return the octets of an array as a section to send, over the same memory.

    Raises `LocalProtocolError` where shape or type are not those of a block, or where the array is not
    contiguous; `numpy.ascontiguousarray` makes it so, by a copy that the caller thereby decides on.
    """
    shape = (descriptor.block_tokens, descriptor.kv_heads, descriptor.head_dim)
    dtype = element_dtype(descriptor)
    if array.shape != shape or array.dtype != dtype:
        raise LocalProtocolError(
            f"expected an array of shape {shape} and type {dtype}, found {array.shape} and {array.dtype}"
        )
    if not array.flags.c_contiguous:
        raise LocalProtocolError("the array is not contiguous; make it so with numpy.ascontiguousarray")
    return array.reshape(-1).view(np.uint8).data
