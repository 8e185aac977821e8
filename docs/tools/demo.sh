#!/usr/bin/env bash
# Shows keys and containers through the command line: docs/tools/demo.sh PATH_OF_KVSP
set -euo pipefail
kvsp=$(realpath "$1")
cd "$(mktemp -d)"
trap 'rm -rf "$PWD"' EXIT
show() { printf '\n$ %s\n' "${*/#$kvsp/kvsp}"; "$@"; }

cat > descriptor.json <<'END'
{
  "model": "example-model",
  "model_digest": "sha-256:254e528c669a2084c9727298cacb83e8854e0a6ff80e2bf18096b9dce0f7ebda",
  "tokenizer_digest": "sha-256:9f42a7a29dca3063ad26d7be7fe6a930fa38afb1a703e4f7ff538db4e133b19c",
  "layers": 32, "kv_heads": 8, "head_dim": 128, "kv_dtype": "bf16",
  "positional": "rope", "block_tokens": 4, "layout": "kvsp-layout-1"
}
END
(umask 077; head -c 32 /dev/urandom > tenant.key)
echo '[128000, 791, 6460, 374, 264, 1296, 315, 279]' > tokens.json
{ printf '\x4b\x56\x42\x31\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x04'
  for _ in 1 2 3 4; do printf '\x00\x00\x00\x00\x00\x00\x20\x00'; done
  head -c 32768 /dev/urandom; } > block.kvb

echo "Which caches may replace each other: the Compatibility ID of a descriptor."
show "$kvsp" compat descriptor.json
echo; echo "Who shares them: the scope of a secret key."
show "$kvsp" scope --scope-key-file tenant.key
echo; echo "What a block is called: a keyed hash of its tokens and of all before them."
show "$kvsp" keys --descriptor descriptor.json --scope-key-file tenant.key --tokens tokens.json
echo; echo "What a block looks like on the wire."
show "$kvsp" inspect block.kvb
