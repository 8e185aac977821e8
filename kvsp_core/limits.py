"""Every limit of the core with its default, and what happens when it is reached.

Machines and roles take these values in their constructors; a deployment overrides what it needs. Sizes are in
octets, durations in milliseconds.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "CALL_TIMEOUT_MS",
    "CHECKPOINT_RETRY_MS",
    "COPY_LEASE_MS",
    "DIRECTIVE_KEPT_MS",
    "ENGINE_FAILING_MS",
    "FAULT_WITHDRAWAL_MS",
    "LEASE_QUOTA_BYTES",
    "LOOKUP_TIMEOUT_MS",
    "MAX_AVOIDED_INSTANCES",
    "MAX_BASE_URI_CHARS",
    "MAX_CONCURRENT_LOADS",
    "MAX_CONCURRENT_RESUMES",
    "MAX_CONTAINER_BYTES",
    "MAX_CONTAINER_LAYERS",
    "MAX_DESCRIPTORS",
    "MAX_DESCRIPTOR_BYTES",
    "MAX_DESCRIPTOR_DEPTH",
    "MAX_DIRECTIVE_BLOCKS",
    "MAX_DIRECTIVE_MS",
    "MAX_EARLY_TOKENS",
    "MAX_ENGINE_FAILURES",
    "MAX_FRONT_END_RETRY_MS",
    "MAX_GENERATIONS",
    "MAX_HOLD_MS",
    "MAX_INCOMING_BLOCKS",
    "MAX_INDEX_BYTES",
    "MAX_INDEX_BYTES_PER_CLIENT",
    "MAX_INDEX_CALLS",
    "MAX_INSTANCES",
    "MAX_INSTANCE_SESSIONS",
    "MAX_INSTANCE_SHARD_MAPS",
    "MAX_KEPT_BLOCKS",
    "MAX_LEASES_PER_CLIENT",
    "MAX_LEASE_KEYS",
    "MAX_LEASE_TTL_MS",
    "MAX_LOOKUP_ANSWER_BYTES",
    "MAX_LOOKUP_KEYS",
    "MAX_LOOKUP_TARGETS",
    "MAX_MEASURED_LINKS",
    "MAX_PARAMETERS_BYTES",
    "MAX_PENDING_BLOCKS",
    "MAX_PENDING_DIRECTIVES",
    "MAX_PENDING_PLACEMENTS",
    "MAX_PLACED_MS",
    "MAX_PLACEMENT_MS",
    "MAX_QUARANTINED",
    "MAX_REMEMBERED_SHARD_MAPS",
    "MAX_REPLICAS_PER_KEY",
    "MAX_REPLICA_TTL_MS",
    "MAX_RESHARD_BODY_BYTES",
    "MAX_RESUME_ATTEMPTS",
    "MAX_SESSIONS",
    "MAX_SESSION_BODY_BYTES",
    "MAX_SESSION_IDLE_MS",
    "MAX_SHARD_BLOCK_KEYS",
    "MAX_SHARD_MAPS",
    "MAX_SHARD_RANGES",
    "MAX_SOURCES_PER_BLOCK",
    "MAX_STATUS_TTL_MS",
    "MAX_TIER_MOVES",
    "MAX_TOKENS_PER_CHECKPOINT",
    "MAX_UNCOVERED_TOKENS",
    "MIN_LEASE_TTL_MS",
    "OUTPUT_SILENCE_MS",
    "OUTPUT_WINDOW_TOKENS",
    "PLACEMENT_CALL_MS",
    "PLACEMENT_WAIT_MS",
    "PROMPT_WAIT_MS",
    "PUBLISH_RETRY_MS",
    "PUBLISH_TIMEOUT_MS",
    "QUARANTINE_MS",
    "REPLICA_TTL_MS",
    "RESHARD_CALLS",
    "RESHARD_DEADLINE_MS",
    "RESHARD_RETRY_MS",
    "RESUME_DEADLINE_MS",
    "RESUME_LOAD_MS",
    "RESUME_WAIT_MS",
    "SESSION_KEPT_MS",
    "SHARED_LEASE_KEYS",
    "STATE_RETRY_MS",
    "STATUS_RETRY_MS",
    "UNREACHABLE_MS",
    "WARM_UP_MS",
]


MAX_SESSION_BODY_BYTES: Final = 16 << 20
"""Octets of a checkpoint or of a request for output, which bring all tokens of a session; more is 413. So a
session can have over a million tokens of any vocabulary."""

MAX_RESHARD_BODY_BYTES: Final = 8 << 20
"""Octets of a reshard plan; more is 413."""

MAX_SHARD_RANGES: Final = 4096
"""Token ranges in one reshard plan, and shards of one map; more is 413 at a member and `LimitExceeded` at a
controller."""

MAX_SHARD_BLOCK_KEYS: Final = 100_000
"""Blocks of a context that is split; more is 413 at a member and `LimitExceeded` at a controller."""

MAX_LOOKUP_KEYS: Final = 8192
"""Block keys in one lookup; more is 413, and clients split a longer prefix into several lookups (LK-4)."""

MAX_REPLICAS_PER_KEY: Final = 8
"""Replica records returned for one key; further ones are left out of the answer."""

MAX_DESCRIPTOR_BYTES: Final = 16 * 1024
"""Octets of a Compatibility Descriptor; a larger one raises `LimitExceeded` unread."""

MAX_DESCRIPTOR_DEPTH: Final = 32
"""Levels of nesting in a Compatibility Descriptor; a deeper one is refused."""

MAX_PARAMETERS_BYTES: Final = 64 * 1024
"""Octets of a sampler's `params` as JSON; larger ones are refused before they are looked through."""

MAX_BASE_URI_CHARS: Final = 2048
"""Characters of a base URI; a longer one is refused."""

MAX_CONTAINER_BYTES: Final = 256 * 1024 * 1024
"""Octets of a KV block container; one that claims more is 413 as soon as its header shows it."""

MAX_CONTAINER_LAYERS: Final = 1024
"""Layers of a KV block container; one that claims more is 413 as soon as its header shows it."""

MAX_LEASE_TTL_MS: Final = 60_000
"""Longest lease granted at a time; more is kvsp-lease-quota, and a lease can be renewed (LE-3)."""

MIN_LEASE_TTL_MS: Final = 1_000
"""Shortest lease that a client asks for anew where a holder refuses longer ones."""

LEASE_QUOTA_BYTES: Final = 64 << 30
"""Octets one client has under lease at a holder, each block counted once; more is kvsp-lease-quota (LE-3)."""

MAX_LEASES_PER_CLIENT: Final = 4096
"""Leases one client has at a holder at a time; more is kvsp-lease-quota."""

FAULT_WITHDRAWAL_MS: Final = 500
"""How long a holder tries to withdraw a leased block that a fault took, before it breaks the lease (LE-4)."""

RESHARD_RETRY_MS: Final = 500
"""How long the coordinator of a reshard waits before it calls a member again that did not answer."""

RESHARD_CALLS: Final = 8
"""How often in a row a member is called to commit or abort a change and does not do it; then it counts as
lost, though it reports, and the change ends without it."""

MAX_PENDING_DIRECTIVES: Final = 64
"""Prefetch directives an instance works on at a time; one more is 503 (SE-3)."""

MAX_DIRECTIVE_BLOCKS: Final = 8192
"""Blocks one prefetch directive may name; more is 413."""

MAX_SOURCES_PER_BLOCK: Final = 16
"""Sources a prefetch directive may name for one block; more is 413."""

MAX_CONCURRENT_LOADS: Final = 8
"""Blocks that prefetch directives load at a time, together; the others wait for their turn (PF-2)."""

MAX_DIRECTIVE_MS: Final = 600_000
"""Longest deadline of a prefetch directive, and longest time what it loaded stays pinned; more is cut to
this."""

DIRECTIVE_KEPT_MS: Final = 60_000
"""How long the outcome of a prefetch directive can be read after it ended; then it is 404."""

MAX_TOKENS_PER_CHECKPOINT: Final = 64
"""Output tokens between two checkpoints of a session, at most (CP-1)."""

MAX_UNCOVERED_TOKENS: Final = 128
"""Output tokens that no acknowledged checkpoint covers; at this many decoding is paused."""

MAX_HOLD_MS: Final = 100
"""How long a token of a sampler that is not deterministic waits before a checkpoint is asked for (CP-3)."""

CHECKPOINT_RETRY_MS: Final = 250
"""How long an instance waits before it sends a checkpoint again that was not answered."""

OUTPUT_WINDOW_TOKENS: Final = 512
"""Output tokens given to a stream that has not taken them yet; the others wait at the instance."""

MAX_EARLY_TOKENS: Final = 4096
"""Output tokens kept that came before an earlier one; beyond it the front end asks for the output again."""

MAX_PENDING_BLOCKS: Final = 65_536
"""Blocks of all pending prefetch directives together; a directive that brings more is 503."""

MAX_KEPT_BLOCKS: Final = 65_536
"""Blocks of all ended prefetch directives that are remembered; beyond it the oldest directive is forgotten
first."""

STATUS_RETRY_MS: Final = 250
"""How long an instance waits, at most, before it sends a status again that failed; it doubles with each
failure up to a sixth of the record's TTL.
"""

MAX_STATUS_TTL_MS: Final = 60_000
"""Longest time a controller believes a status record, and what it gives each instance after its own
restart.
"""

MAX_INSTANCES: Final = 4096
"""Instances one controller knows; a status of one more is 503."""

STATE_RETRY_MS: Final = 1000
"""How long a controller waits before it asks an instance again for a state that it does not report yet."""

WARM_UP_MS: Final = 30_000
"""How long a new incarnation of an instance counts for less in placement."""

MAX_PLACED_MS: Final = 60_000
"""How long a session may be placed without a checkpoint; then it has failed (decision W19)."""

MAX_SESSION_IDLE_MS: Final = 600_000
"""How long a running session may send no checkpoint; then it has failed, since nobody serves it."""

RESUME_DEADLINE_MS: Final = 30_000
"""How long an instance may take to confirm a resume; then the next one is asked (decision W20). It is longer
than loading the blocks and waiting for the prompt take together; one that fails is noticed by its status."""

RESUME_LOAD_MS: Final = 12_000
"""How long an instance loads the blocks of a session it resumes; what is missing then is computed."""

RESUME_WAIT_MS: Final = 30_000
"""How long a session waits for an instance that can resume it; then it has failed. Time in line, behind other
sessions that have lost theirs, does not count."""

MAX_RESUME_ATTEMPTS: Final = 4
"""Instances asked in a row to resume a session; when the last has not confirmed it has failed."""

SESSION_KEPT_MS: Final = 60_000
"""How long it can be read how a session ended; then it is 404."""

PROMPT_WAIT_MS: Final = 10_000
"""How long a resumed session whose prompt blocks are gone waits for the front end to bring the prompt."""

MAX_REPLICA_TTL_MS: Final = 3_600_000
"""Longest time the index keeps a record without a refresh; a longer TTL is capped (PB-2)."""

MAX_INDEX_BYTES_PER_CLIENT: Final = 1 << 30
"""Room for the records of one publishing client in the index; more is 507. A record counts 256 octets and 32
for each layer digest, a new combination of holder, descriptor, scope and residency 2,048."""

MAX_INDEX_BYTES: Final = 8 << 30
"""Room for all records of the index, counted likewise; more is 507."""

MAX_LOOKUP_ANSWER_BYTES: Final = 64 << 20
"""Octets of the answer to a lookup; beyond it replicas of each key are left out, then keys at the end."""

QUARANTINE_MS: Final = 600_000
"""How long the index refuses a replica that was withdrawn as bad (decision W12)."""

MAX_QUARANTINED: Final = 65_536
"""Replicas refused as bad at a time; beyond it the oldest is forgotten."""

MAX_LOOKUP_TARGETS: Final = 256
"""Instances one lookup may ask estimates for; more is 413."""

MAX_DESCRIPTORS: Final = 1024
"""Compatibility Descriptors one role keeps by content; one more is 507."""

MAX_GENERATIONS: Final = 4096
"""Generations one front end has under way; one more fails with 503."""

OUTPUT_SILENCE_MS: Final = 10_000
"""How long a stream of output may be silent before the front end asks who owns the session."""

MAX_PLACEMENT_MS: Final = 30_000
"""How long a front end tries to have a request placed; then it fails with 503."""

MAX_FRONT_END_RETRY_MS: Final = 2_000
"""Longest time a front end waits before it asks a controller again."""

MAX_SESSIONS: Final = 100_000
"""Sessions a controller knows at a time, ended ones that are kept included; one more is 503."""

MAX_CONCURRENT_RESUMES: Final = 32
"""Sessions that a controller fails over at a time, at most half of them without being asked about; the others
wait for their turn."""

MAX_PENDING_PLACEMENTS: Final = 4096
"""Requests that wait for an answer of the index or for an instance; one more is 503."""

PLACEMENT_WAIT_MS: Final = 10_000
"""How long a request waits for an instance that can take it; then it is 503."""

CALL_TIMEOUT_MS: Final = 5_000
"""How long a role waits for the answer to a call, where nothing else says."""

LOOKUP_TIMEOUT_MS: Final = 2_000
"""How long a placement waits for an answer of the index; then it goes on without, while its front end still
waits."""

PLACEMENT_CALL_MS: Final = PLACEMENT_WAIT_MS + LOOKUP_TIMEOUT_MS
"""How long a front end waits for the answer to a placement: as long as a controller may take that waits for
an instance, and for an index that is silent. One that gave up before would lose its place in the line."""

MAX_INSTANCE_SESSIONS: Final = 4096
"""Sessions an instance has or remembers at a time. For one more, that is forgotten which has been over for
longest; where none is over, it is 503.
"""

MAX_INSTANCE_SHARD_MAPS: Final = 256
"""Shard maps an instance takes part in; a plan for one more is 503."""

MAX_REMEMBERED_SHARD_MAPS: Final = 4096
"""Shard maps of which an instance holds nothing and remembers the highest version; beyond it the one heard of
longest ago is forgotten."""

REPLICA_TTL_MS: Final = 600_000
"""How long a holder asks the index to keep its records; it refreshes them at a third of that (PB-3)."""

MAX_INDEX_CALLS: Final = 32
"""Requests that a holder has on their way to a part of the index at a time; more wait for their turn."""

PUBLISH_TIMEOUT_MS: Final = 5000
"""How long a holder waits for the index's answer to a publication or withdrawal."""

PUBLISH_RETRY_MS: Final = 500
"""The first pause before a holder asks the index again; it doubles up to 64 times this, and is spread."""

MAX_INCOMING_BLOCKS: Final = 64
"""Blocks that a holder takes in at a time; more is 503."""

MAX_TIER_MOVES: Final = 4
"""Blocks that a holder moves between its tiers at a time; others stay where they are for now."""

MAX_LEASE_KEYS: Final = 8192
"""Block keys in one lease; more is 413."""

MAX_AVOIDED_INSTANCES: Final = 16
"""Instances that a request to be placed asks to avoid; more is 400."""

MAX_ENGINE_FAILURES: Final = 3
"""How often in a row an engine may fail: then a generation is given up with 502, and an instance whose engine
has ended as many, with no token in between, reports that it is failing."""

ENGINE_FAILING_MS: Final = 30_000
"""How long after its engine's last failure an instance that is failing says so. Then it is given work again,
of which the first that fails has it say so once more."""

ENGINE_SILENCE_MS: Final = 120_000
"""How long an engine that has work may report nothing at all; then its instance takes it for hung. A long
prompt that an engine computes in one piece takes less: 128k tokens at 1,100 a second."""

SHARED_LEASE_KEYS: Final = 256
"""Blocks that an instance has leased at a time for what it loads from a holder; more are several leases."""

UNREACHABLE_MS: Final = 5_000
"""How long an instance asks a holder or a part of the index for nothing further after one request of it got
no answer, and how long a controller waits before it asks such a part once more whether it answers."""

COPY_LEASE_MS: Final = 45_000
"""How long copies of a session's blocks are kept after its instance was last heard of: longer than noticing
that it failed and resuming the session elsewhere take together (decision W20)."""

MAX_SHARD_MAPS: Final = 10_000
"""Shard maps a controller keeps; one more raises `LimitExceeded`."""

RESHARD_DEADLINE_MS: Final = 30_000
"""How long members may take to load what a reshard gives them; then it is given up (RS-5)."""

MAX_MEASURED_LINKS: Final = 256
"""Holders whose links an instance measures and reports; beyond it the one heard of longest ago is left
out."""
