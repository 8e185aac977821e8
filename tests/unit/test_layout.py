"""Sections of codec raw as arrays: the protocol's order and octets, over the same memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvsp_core.container import ContainerError, OutgoingBlock, decode_container
from kvsp_core.container import ContainerHeader as Header
from kvsp_core.errors import LocalProtocolError
from kvsp_core.layout import element_dtype, section_array, section_octets
from kvsp_core.problems import INCOMPATIBLE
from kvsp_core.registries import ELEMENT_TYPES, ElementType, Registries
from tests.unit.test_identity import descriptor

MODEL = descriptor(layers=1, kv_heads=2, head_dim=3, kv_dtype="fp32", block_tokens=2)


@pytest.mark.requirement("KC-4")
def test_token_is_slowest_and_dimension_fastest() -> None:
    section = np.arange(12, dtype="<f4").tobytes()
    array = section_array(section, MODEL)
    assert array.shape == (2, 2, 3)
    assert array[1, 0, 2] == 1 * 6 + 0 * 3 + 2
    assert array[0, 1, 0] == 3


@pytest.mark.requirement("KC-4")
@pytest.mark.parametrize(
    ("kv_dtype", "octets", "value"),
    [
        ("fp32", b"\x00\x00\x80\x3f", 1.0),
        ("fp32", b"\x00\x00\x20\xc0", -2.5),
        ("fp16", b"\x00\x3c", 1.0),
        ("fp16", b"\x00\xc1", -2.5),
        ("bf16", b"\x80\x3f", 1.0),
        ("bf16", b"\x20\xc0", -2.5),
        ("fp8-e4m3", b"\x38", 1.0),
        ("fp8-e4m3", b"\xc2", -2.5),
        ("fp8-e4m3", b"\x7e", 448.0),
        ("fp8-e5m2", b"\x3c", 1.0),
        ("fp8-e5m2", b"\xc1", -2.5),
        ("fp8-e5m2", b"\x7b", 57344.0),
    ],
)
def test_elements_are_little_endian(kv_dtype: str, octets: bytes, value: float) -> None:
    model = descriptor(kv_heads=1, head_dim=1, block_tokens=2, kv_dtype=kv_dtype)
    array = section_array(octets * 2, model)
    assert array.astype(np.float64).ravel().tolist() == [value, value]
    assert bytes(section_octets(array, model)) == octets * 2


@pytest.mark.requirement("KC-4")
@pytest.mark.parametrize("kv_dtype", sorted(ELEMENT_TYPES))
def test_nothing_is_copied_in_either_direction(kv_dtype: str) -> None:
    model = descriptor(kv_heads=2, head_dim=4, block_tokens=2, kv_dtype=kv_dtype)
    memory = bytearray(model.section_bytes(2))
    array = section_array(memory, model)
    memory[0:4] = b"\x01\x02\x03\x04"
    assert array.view(np.uint8).ravel()[:4].tolist() == [1, 2, 3, 4]
    octets = section_octets(array, model)
    assert (octets.nbytes, octets.format) == (len(memory), "B")
    memory[0] = 9
    assert octets[0] == 9
    array[...] = 0
    assert not any(memory)


@pytest.mark.requirement("KC-4")
def test_what_is_read_only_stays_so() -> None:
    assert not section_array(bytes(48), MODEL).flags.writeable
    assert not section_array(memoryview(bytearray(48)).toreadonly(), MODEL).flags.writeable


@pytest.mark.requirement("KC-4")
@pytest.mark.parametrize("size", [0, 47, 49, 96])
def test_a_section_of_another_size_is_incompatible(size: int) -> None:
    with pytest.raises(ContainerError, match="the descriptor gives it 48") as refused:
        section_array(bytes(size), MODEL)
    assert refused.value.problem.type == INCOMPATIBLE


@pytest.mark.requirement("KC-4")
def test_arrays_that_are_no_section_are_refused() -> None:
    right = np.zeros((2, 2, 3), dtype=np.float32)
    section_octets(right, MODEL)
    for wrong in (right.reshape(2, 6), right.astype(np.float16), right.astype(">f4"), right[:1]):
        with pytest.raises(LocalProtocolError, match="expected an array of shape"):
            section_octets(wrong, MODEL)
    with pytest.raises(LocalProtocolError, match="ascontiguousarray"):
        section_octets(np.zeros((3, 2, 2), dtype=np.float32).T, MODEL)


@pytest.mark.requirement("KC-4", "KC-1")
def test_an_engine_exports_and_imports_a_block() -> None:
    made = np.random.default_rng(7).standard_normal((2, 2, 2, 3)).astype(ml_dtypes.bfloat16)
    model = descriptor(layers=1, kv_heads=2, head_dim=3, kv_dtype="bf16", block_tokens=2)
    outgoing = OutgoingBlock(
        Header.for_layers(model), [(section_octets(made[0], model), section_octets(made[1], model))]
    )
    container = b"".join(outgoing.pieces)
    header, digests = decode_container(container, descriptor=model)
    assert digests == outgoing.layer_digests()
    k_bytes, _ = header.sections[0]
    k_section = memoryview(container)[header.header_bytes :][:k_bytes]
    assert (section_array(k_section, model) == made[0]).all()


@pytest.mark.requirement("RG-1")
def test_other_element_types_and_layouts() -> None:
    def with_type(dtype: str) -> Registries:
        kind = ElementType(name="mine", size_bytes=1, dtype=dtype, description="")
        return Registries(element_types=ELEMENT_TYPES.with_entry("mine", kind))

    int4 = descriptor(kv_dtype="mine", registries=with_type("int8"))
    assert element_dtype(int4) == np.int8
    with pytest.raises(LocalProtocolError, match="numpy has no type 'no-such'"):
        element_dtype(descriptor(kv_dtype="mine", registries=with_type("no-such")))
    with pytest.raises(LocalProtocolError, match="only 'kvsp-layout-1'"):
        element_dtype(descriptor(layout="other"))
