"""Block keys of 131,072 tokens at B = 16, beside what engines do today and beside the limit in C."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import pickle
import random
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np

from kvsp_core.block_keys import block_keys
from kvsp_core.identity import CompatibilityDescriptor, Scope
from tests.bench import Row, interleaved, left_out, row, tool
from tests.bench.bench_container import descriptor

__all__ = ["rows"]

BLOCK_TOKENS = 16
TOKENS = 131_072
BLOCKS = TOKENS // BLOCK_TOKENS
SCOPE_KEY = bytes(range(32))


def pickled_sha256(value: object) -> bytes:
    """Return the SHA-256 of a pickled value: the hash function that vLLM takes by default."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def pickled_block(hash_function: Callable[[object], bytes], parent: bytes, tokens: list[int]) -> bytes:
    """Return a block's hash, with the call for each block and the tuple that engines make."""
    return hash_function((parent, tuple(tokens), None))


def pickled_chain(tokens: list[int]) -> list[bytes]:
    """Return the hashes of all blocks of a token list."""
    parent = bytes(32)
    hashes = []
    for start in range(0, len(tokens), BLOCK_TOKENS):
        parent = pickled_block(pickled_sha256, parent, tokens[start : start + BLOCK_TOKENS])
        hashes.append(parent)
    return hashes


def chain_in_c(made_with: CompatibilityDescriptor, tokens: list[int]) -> Callable[[], bytes] | str:
    """Return a call of the C loop that gives all keys joined, or why there is none."""
    compiler, crypto = tool("cc") or tool("gcc"), ctypes.util.find_library("crypto")
    if compiler is None or crypto is None:
        return "needs a C compiler and libcrypto"
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory) / "chain.so"
        source = Path(__file__).with_name("chain.c")
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(built), str(source)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return "the C compiler fails"
        ctypes.CDLL(crypto, ctypes.RTLD_GLOBAL)
        function = ctypes.CDLL(str(built)).chain
    function.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_size_t, ctypes.c_char_p]
    packed = np.array(tokens, dtype=">u4").tobytes()
    key, compat_id = SCOPE_KEY.ljust(64, b"\0"), bytes.fromhex(made_with.compat_id)
    keys = ctypes.create_string_buffer(32 * BLOCKS)

    def run() -> bytes:
        function(key, compat_id, packed, BLOCKS, keys)
        return keys.raw

    return run


def rows() -> Iterator[Row]:
    """Yield the figures of block keys."""
    scope, made_with = Scope(SCOPE_KEY), attrs.evolve(descriptor(), block_tokens=BLOCK_TOKENS)
    draw = random.Random(7)
    tokens = [draw.randrange(128_000) for _ in range(TOKENS)]
    words, wide = array("I", tokens), np.array(tokens, dtype=np.int64)
    candidates: dict[str, Callable[[], object]] = {
        "pickle": lambda: pickled_chain(tokens),
        "array": lambda: block_keys(scope, made_with, words),
        "numpy_int64": lambda: block_keys(scope, made_with, wide),
        "list": lambda: block_keys(scope, made_with, tokens),
    }
    in_c = chain_in_c(made_with, tokens)
    if not isinstance(in_c, str):
        if in_c() != b"".join(block_keys(scope, made_with, tokens)[0]):
            raise AssertionError("the C loop gives other keys")
        candidates["c"] = in_c
    times = interleaved(candidates, rounds=15)
    for name, rate, factor in (("array", 1.4, 5.0), ("numpy_int64", 1.4, 5.0), ("list", 1.0, 7.0)):
        subject = f"keys.{name}_131072_tokens"
        took = times[name] / BLOCKS * 1e6
        yield row(
            f"{subject}.rate_vs_pickle",
            times["pickle"] / times[name],
            "ratio",
            at_least=rate,
            note=f"{took:.2f} us a block",
        )
        if isinstance(in_c, str):
            yield left_out(f"{subject}.time_vs_c", in_c)
        else:
            yield row(
                f"{subject}.time_vs_c",
                times[name] / times["c"],
                "ratio",
                at_most=factor,
                note=f"C {times['c'] / BLOCKS * 1e6:.2f} us a block",
            )
