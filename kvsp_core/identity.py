"""Who and what: Compatibility Descriptors, scopes, base URIs and component identifiers.

Protocol sections "Compatibility Descriptor and Compatibility ID", "Scopes and Block Keys" and "HTTP Usage";
requirements CD-1 to CD-8, SK-1, SK-4, SK-5 and HT-7.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NoReturn

import attrs
import rfc8785

from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.limits import MAX_BASE_URI_CHARS
from kvsp_core.registries import INITIAL_REGISTRIES, Registries
from kvsp_core.strict_json import Json, frozen_json, kind_of, strict_json, thawed_json

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = [
    "BaseURI",
    "CompatibilityDescriptor",
    "Scope",
    "component_id",
    "digest_of_files",
    "parse_base_uri",
]

MAX_UINT32: Final = 2**32 - 1
MIN_SCOPE_KEY_BYTES: Final = 32

_DIGEST = re.compile(r"sha-256:[0-9a-f]{64}")
_BASE_URI = re.compile(
    r"https://(?P<host>[A-Za-z0-9][A-Za-z0-9._~-]*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[1-9][0-9]{0,4}))?"
    r"(?P<path>/(?:(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*/)*)"
)


# Compatibility Descriptors ------------------------------------------------------------------------


@attrs.frozen(kw_only=True, eq=False)
class CompatibilityDescriptor:
    """States what a cache was made with: caches may replace each other only if their `compat_id` is equal.

    Members have the names, types and meaning of the protocol. `adapters` is empty where no adapter is
    applied. `other_members` are members this version does not know: they are part of the identity and kept
    as they came. `registries` says which element types and positional encodings are known; it is no part of
    the identity. Descriptors are equal, and hash equal, when their Compatibility IDs are.

    Raises `LocalProtocolError`, naming the member, for a value the protocol does not allow, and
    `LimitExceeded` beyond `MAX_DESCRIPTOR_BYTES`. Documents that come from elsewhere are read with
    `from_json` or `from_members`.
    """

    model: str
    model_digest: str
    tokenizer_digest: str
    adapters: tuple[str, ...] = ()
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    positional: str
    block_tokens: int
    layout: str = "kvsp-layout-1"
    other_members: Mapping[str, Json] = attrs.field(factory=dict)
    registries: Registries = attrs.field(default=INITIAL_REGISTRIES, repr=False)
    canonical_json: bytes = attrs.field(init=False, repr=False)
    compat_id: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        known = {name: getattr(self, name) for name in _MEMBERS}
        if self.adapters != ():
            known["adapters"] = self.adapters
        try:
            others = _frozen_members(self.other_members)
            if not others.keys().isdisjoint((*_MEMBERS, "adapters")):
                raise RemoteProtocolError("give known members by their own names", member="other_members")
            members = _frozen_members(known) | others
            _check_members(members, self.registries)
            canonical = _canonical(members)
        except RemoteProtocolError as error:
            raise LocalProtocolError(str(error)) from error
        set_field = object.__setattr__
        set_field(self, "adapters", members.get("adapters", ()))
        set_field(self, "other_members", MappingProxyType(others))
        set_field(self, "canonical_json", canonical)
        set_field(self, "compat_id", hashlib.sha256(b"KVSP-COMPAT-1\0" + canonical).hexdigest())

    @classmethod
    def from_json(
        cls, octets: bytes | bytearray | memoryview, *, registries: Registries = INITIAL_REGISTRIES
    ) -> CompatibilityDescriptor:
        """Return the descriptor that a JSON document holds, read strictly.

        Raises `RemoteProtocolError`, naming the member, where the document is not UTF-8 JSON, repeats a
        member name, holds NaN, an infinity or an integer beyond 2^53-1, or where a member is missing or
        wrong; `LimitExceeded` where it is larger than `MAX_DESCRIPTOR_BYTES` (CD-1, decision W4).
        """
        return cls.from_members(strict_json(octets), registries=registries)

    @classmethod
    def from_members(
        cls, members: object, *, registries: Registries = INITIAL_REGISTRIES
    ) -> CompatibilityDescriptor:
        """Return the descriptor with the members of a parsed JSON object.

        Raises `RemoteProtocolError`, naming the member, where one is missing or wrong.
        """
        others = _frozen_members(members)
        for name in _MEMBERS:
            if name not in others:
                raise RemoteProtocolError("is missing; every descriptor states it", member=name)
        if others.get("adapters") == ():
            raise RemoteProtocolError("is empty; leave it out where no adapter is applied", member="adapters")
        known = {name: others.pop(name) for name in (*_MEMBERS, "adapters") if name in others}
        try:
            return cls(**known, other_members=others, registries=registries)  # type: ignore[arg-type]
        except LocalProtocolError as error:
            raise error.__cause__ or error from None

    def members(self) -> dict[str, Json]:
        """Return the JSON object of this descriptor, newly made: what `from_members` reads."""
        members: dict[str, Json] = json.loads(self.canonical_json)
        return members

    def section_bytes(self, token_count: int) -> int:
        """Return the octets of one K or V section of codec ``raw`` for this many tokens (KC-4)."""
        element_bytes = self.registries.element_types[self.kv_dtype].size_bytes
        return token_count * self.kv_heads * self.head_dim * element_bytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompatibilityDescriptor):
            return NotImplemented
        return self.compat_id == other.compat_id

    def __hash__(self) -> int:
        return hash(self.compat_id)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_descriptor, (self.canonical_json, self.registries)


def _rebuild_descriptor(octets: bytes, registries: Registries) -> CompatibilityDescriptor:
    return CompatibilityDescriptor.from_json(octets, registries=registries)


_TEXTS: Final = ("model", "kv_dtype", "positional", "layout")
_DIGESTS: Final = ("model_digest", "tokenizer_digest")
_SIZES: Final = ("layers", "kv_heads", "head_dim", "block_tokens")
_MEMBERS: Final = (*_TEXTS, *_DIGESTS, *_SIZES)


def _frozen_members(members: object) -> dict[str, Json]:
    if not isinstance(members, Mapping):
        raise RemoteProtocolError(f"a descriptor is a JSON object, found {kind_of(members)}")
    frozen = frozen_json(members)
    assert isinstance(frozen, Mapping)
    return dict(frozen)


def _canonical(members: Mapping[str, Json]) -> bytes:
    """Return the canonical form (RFC 8785), which has to be a document that can be read again.

    It might not be: 1e20, which is a number like any other, is written as an integer too large to be read.
    """
    canonical = rfc8785.dumps(thawed_json(members))  # type: ignore[arg-type]
    strict_json(canonical)
    return canonical


def _check_members(members: Mapping[str, object], registries: Registries) -> None:
    """Raise `RemoteProtocolError` for the first member that is missing or not as the protocol says."""
    for name in _TEXTS:
        value = members[name]
        if not isinstance(value, str) or not value:
            raise RemoteProtocolError(f"expected text, found {kind_of(value)}", member=name)
    for name in _DIGESTS:
        _check_digest(members[name], name)
    for name in _SIZES:
        value = members[name]
        if type(value) is not int or not 1 <= value <= MAX_UINT32:
            raise RemoteProtocolError(
                f"expected an integer from 1 to {MAX_UINT32}, found {kind_of(value)}", member=name
            )
    if "adapters" in members:
        adapters = members["adapters"]
        if not isinstance(adapters, (list, tuple)) or not adapters:
            raise RemoteProtocolError(
                f"expected an array of digests, found {kind_of(adapters)}", member="adapters"
            )
        for index, adapter in enumerate(adapters):
            _check_digest(adapter, f"adapters[{index}]")
    _check_registered(str(members["kv_dtype"]), str(members["positional"]), registries)


def _check_digest(value: object, member: str) -> None:
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise RemoteProtocolError(
            f"expected 'sha-256:' and 64 lowercase hex digits, found {kind_of(value)}", member=member
        )


def _check_registered(kv_dtype: str, positional: str, registries: Registries) -> None:
    if kv_dtype not in registries.element_types:
        raise RemoteProtocolError(
            f"expected a registered element type: {', '.join(registries.element_types)}", member="kv_dtype"
        )
    name, separator, parameters = positional.partition(";")
    encoding = registries.positional_encodings.get(name)
    if encoding is None:
        raise RemoteProtocolError(
            f"expected a registered positional encoding: {', '.join(registries.positional_encodings)}",
            member="positional",
        )
    if separator and not (
        encoding.parameter_syntax and re.fullmatch(encoding.parameter_syntax, parameters, re.ASCII)
    ):
        expected = encoding.parameter_syntax or "no parameters"
        raise RemoteProtocolError(
            f"the parameters of {name!r} do not have the registered syntax ({expected})", member="positional"
        )


# Digests of files ---------------------------------------------------------------------------------


def digest_of_files(files: Mapping[str, Iterable[bytes]]) -> str:
    """Return ``sha-256:`` and the digest of files concatenated in ascending byte order of their names (CD-3).

    `files` gives for each name the octets of the file in pieces, which are read one after the other and
    never joined; a generator is first asked when its turn comes. One file, under any name, gives the digest
    of that file, which is what a tokenizer or adapter digest is.
    """
    if not files:
        raise LocalProtocolError("a digest needs at least one file")
    digest = hashlib.sha256()
    for name in sorted(files, key=lambda name: name.encode("utf-8", "surrogateescape")):
        for piece in files[name]:
            digest.update(piece)
    return "sha-256:" + digest.hexdigest()


# Scopes -------------------------------------------------------------------------------------------

_INNER_PAD: Final = bytes(octet ^ 0x36 for octet in range(256))
_OUTER_PAD: Final = bytes(octet ^ 0x5C for octet in range(256))


@attrs.frozen(init=False, repr=False, eq=False)
class Scope:
    """A set of principals that share caches, by its secret Scope Key of at least 32 octets (SK-1, SK-4,
    SK-5).

    The key itself is not kept: only hash states that have taken it in, from which block keys are computed.
    So no representation, traceback, dump or copy of a scope can show it. A scope cannot be pickled. Two
    scopes are equal when their keys are, compared in constant time.

    Raises `LocalProtocolError` for a key that is too short or not octets.
    """

    scope_id: str
    _digest: bytes
    _inner: _Hash
    _outer: _Hash

    def __init__(self, key: bytes | bytearray | memoryview) -> None:
        fault = _key_fault(key)
        if fault:
            del key  # a traceback that shows local variables must not show it
            raise LocalProtocolError(fault)
        octets = bytes(key)
        digest = hashlib.sha256(b"KVSP-SCOPE-1\0" + octets).digest()
        block = (octets if len(octets) <= 64 else hashlib.sha256(octets).digest()).ljust(64, b"\0")
        self.__attrs_init__(
            digest[:16].hex(),
            digest,
            hashlib.sha256(block.translate(_INNER_PAD)),
            hashlib.sha256(block.translate(_OUTER_PAD)),
        )

    def start_hmac(self) -> tuple[_Hash, _Hash]:
        """Return the inner and outer SHA-256 states of an HMAC under the Scope Key, to go on from."""
        return self._inner.copy(), self._outer.copy()

    def __repr__(self) -> str:
        return f"<Scope {getattr(self, 'scope_id', 'without a key')}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scope):
            return NotImplemented
        return hmac.compare_digest(self._digest, other._digest)

    def __hash__(self) -> int:
        return hash(self.scope_id)

    def __copy__(self) -> Scope:
        return self

    def __deepcopy__(self, memo: object) -> Scope:
        return self

    def __reduce__(self) -> NoReturn:
        raise LocalProtocolError("a scope is not pickled: hand its key on by the means that protect it")


def _key_fault(key: object) -> str:
    if not isinstance(key, (bytes, bytearray, memoryview)):
        return f"a Scope Key is octets, found {type(key).__name__}"
    size = memoryview(key).nbytes
    if size < MIN_SCOPE_KEY_BYTES:
        return f"a Scope Key has at least {MIN_SCOPE_KEY_BYTES} random octets, found {size}"
    return ""


# Base URIs and component identifiers --------------------------------------------------------------


@attrs.frozen
class BaseURI:
    """The base URI of a role: `uri` exactly as given, and its parts. `host` has no brackets."""

    uri: str
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        return self.uri


def parse_base_uri(uri: object, *, member: str = "") -> BaseURI:
    """Return the parts of a base URI: ``https``, a host, a path that ends in ``/``, and nothing else
    (decision W2).

    Nothing is normalised, and what a client would normalise before use is refused, so that one component
    has one identifier. Raises `RemoteProtocolError` that names `member`.
    """
    if not isinstance(uri, str):
        raise RemoteProtocolError(f"expected a base URI, found {kind_of(uri)}", member=member)
    parts = _BASE_URI.fullmatch(uri) if len(uri) <= MAX_BASE_URI_CHARS else None
    if parts is None:
        raise RemoteProtocolError(_uri_fault(uri), member=member)
    host, port, path = parts["host"], int(parts["port"] or 443), parts["path"]
    if port > 65535:
        raise RemoteProtocolError("the port of a base URI is within 1..65535", member=member)
    if "/./" in path or "/../" in path:
        raise RemoteProtocolError("a base URI has no '.' or '..' in its path", member=member)
    if host[0] == "[":
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise RemoteProtocolError("what is in brackets is not an IPv6 address", member=member) from None
    return BaseURI(uri, host, port, path)


def _uri_fault(uri: str) -> str:
    """Say in plain words why a text is not a base URI."""
    if len(uri) > MAX_BASE_URI_CHARS:
        return f"a base URI has at most {MAX_BASE_URI_CHARS} characters, found {len(uri)}"
    if not uri.startswith("https://"):
        return "a base URI starts with 'https://'"
    authority = uri[8:].partition("/")[0]
    if "?" in uri or "#" in uri or "@" in authority:
        return "a base URI has no query, fragment or user information"
    if not uri.endswith("/"):
        return "a base URI ends in '/'"
    return "expected https://host/ or https://host:port/path/, of the characters a URI may have"


def component_id(base_uri: str) -> str:
    """Return the holder-id or instance-id of a base URI: base64url without padding of its SHA-256 (HT-7)."""
    digest = hashlib.sha256(base_uri.encode("utf-8")).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
