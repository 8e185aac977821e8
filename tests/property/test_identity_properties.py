"""Descriptors, scopes and base URIs: any document is read or refused in one documented way."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.errors import LimitExceeded, LocalProtocolError, RemoteProtocolError
from kvsp_core.identity import CompatibilityDescriptor, Scope, parse_base_uri
from kvsp_core.model_config import derive_descriptor
from kvsp_sim.strategies.values import any_json, descriptors, json_values, mutated
from tests.unit.test_identity import MEMBERS
from tests.unit.test_model_config import LLAMA


@pytest.mark.requirement("CD-5")
@given(made=descriptors(), data=st.data())
def test_the_order_and_form_of_members_do_not_matter(
    made: CompatibilityDescriptor, data: st.DataObject
) -> None:
    members = data.draw(st.permutations(list(made.members().items())))
    document = json.dumps(dict(members), indent=data.draw(st.none() | st.integers(0, 2)), ensure_ascii=False)
    read = CompatibilityDescriptor.from_json(document.encode())
    assert read == made
    assert read.canonical_json == made.canonical_json
    assert read.members() == made.members()


@pytest.mark.requirement("CD-5")
@given(made=descriptors(), value=json_values)
def test_any_further_member_changes_the_identity(made: CompatibilityDescriptor, value: Any) -> None:
    assert CompatibilityDescriptor.from_members(made.members() | {"zz": value}) != made


@pytest.mark.requirement("CD-1")
@given(
    octets=st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace"))
)
def test_any_octets_are_refused_plainly(octets: bytes) -> None:
    with pytest.raises((RemoteProtocolError, LimitExceeded)):
        CompatibilityDescriptor.from_json(octets)


@pytest.mark.requirement("CD-1")
@given(made=descriptors(), data=st.data())
def test_a_spoilt_document_is_another_descriptor_or_refused(
    made: CompatibilityDescriptor, data: st.DataObject
) -> None:
    spoilt = data.draw(mutated(made.canonical_json))
    try:
        read = CompatibilityDescriptor.from_json(spoilt)
    except (RemoteProtocolError, LimitExceeded):
        return
    assert CompatibilityDescriptor.from_json(read.canonical_json) == read
    assert (read == made) == (read.canonical_json == made.canonical_json)


@pytest.mark.requirement("CD-1")
@given(
    changes=st.dictionaries(st.sampled_from([*MEMBERS, "adapters", "zz"]), any_json(), min_size=1, max_size=3)
)
def test_any_members_are_read_or_refused(changes: dict[str, Any]) -> None:
    refused: RemoteProtocolError | None = None
    try:
        read = CompatibilityDescriptor.from_members(MEMBERS | changes)
    except RemoteProtocolError as error:
        refused = error
    if refused is None:
        assert CompatibilityDescriptor.from_members(read.members()) == read
    else:
        assert refused.member.split("[")[0].split(".")[0] in changes


@pytest.mark.requirement("SK-1")
@given(one=st.binary(max_size=70), other=st.binary(max_size=70))
def test_scopes_are_one_to_one_with_keys(one: bytes, other: bytes) -> None:
    if min(len(one), len(other)) < 32:
        with pytest.raises(LocalProtocolError):
            Scope(min(one, other, key=len))
    else:
        assert (Scope(one) == Scope(other)) == (one == other)
        assert (Scope(one).scope_id == Scope(other).scope_id) == (one == other)


URI_PIECES = st.sampled_from(
    [
        *(
            "https://",
            "http://",
            "h1.example",
            "[::1]",
            "[",
            "]",
            ":443",
            ":0",
            ":",
            "/",
            "//",
            "kvsp",
            ".",
            "..",
        ),
        *("%2F", "%", "?", "#", "@", "u:p@", " ", "\n", "\t", "\\", "\u00e9", "\x00", "0", "A"),
    ]
)


@given(uri=st.lists(URI_PIECES, max_size=8).map("".join) | st.text(max_size=20))
def test_a_base_uri_means_to_us_what_it_means_to_others(uri: str) -> None:
    try:
        parsed = parse_base_uri(uri)
    except RemoteProtocolError:
        return
    other = urlsplit(uri)
    assert (other.scheme, other.query, other.fragment, other.username) == ("https", "", "", None)
    assert (parsed.host.lower(), parsed.port, parsed.path) == (other.hostname, other.port or 443, other.path)
    assert uri.endswith("/")


@given(
    changes=st.dictionaries(
        st.sampled_from([*LLAMA, "rope_parameters", "dtype", "head_dim", "layer_types", "text_config"]),
        any_json() | st.fixed_dictionaries({"rope_type": any_json(), "rope_theta": any_json()}),
        max_size=3,
    )
)
def test_any_model_configuration_gives_a_descriptor_or_one_error(changes: dict[str, Any]) -> None:
    try:
        derive_descriptor(LLAMA | changes, model="m", weights={"w": [b""]}, tokenizer=[b""], block_tokens=16)
    except LocalProtocolError:
        return
