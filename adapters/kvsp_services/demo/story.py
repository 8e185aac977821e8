"""The story of the demonstration: what is done to the cluster, and what has to hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from kvsp_core.block_keys import block_keys
from kvsp_core.errors import KVSPError
from kvsp_core.ext_messages import SessionInfo
from kvsp_core.machines.reshard_plan import Transition
from kvsp_core.messages import DirectiveStatus, PrefetchBlock, PrefetchDirective
from kvsp_core.records import Sampler
from kvsp_core.resources import GetDirective, PrefetchBlocks
from kvsp_core.roles.engine import SequenceEnded, StartSequence, TokensDecoded
from kvsp_engines.engine import NumpyEngine
from kvsp_engines.llama import Array
from kvsp_engines.text import TextCodec
from kvsp_services.asking import expect_success
from kvsp_services.demo.client import Client, Reply
from kvsp_services.demo.cluster import INSTANCES, Cluster, wait_until
from kvsp_services.demo.sharding import SharedContext
from kvsp_services.demo.steps import Scale, Step
from kvsp_services.demo.watching import Watcher

__all__ = ["Story", "document"]

_LOGITS_TOLERANCE: Final = MappingProxyType({"fp32": 1e-5, "bf16": 2**-8})
"""How far logits that were merged over shards may be from the unsharded ones, as a part of the largest.

Sums in another order differ in the last bits: with K and V in fp32 by 1.5e-6 at most over 24 random splits of
SmolLM2. In bf16 such a difference now and then rounds a K or V of the tail to the neighbouring value, 2^-8
away, which the layers carry on: 1.3e-3 at most, 5.9e-4 in the median. The bound is one step of bf16."""
_UNDER_WAY: Final = ("placed", "running", "resuming")
_TRIES: Final = 3
"""How often an answer is asked for again that was complete before it could be disturbed."""

QUESTIONS: Final = (
    "What is this text about?",
    "What must never happen?",
    "Name one thing the text asks of its reader.",
    "Tell a long story about the people who wrote this.",
)


class Story:
    """Tells the steps, one after the other, on a running cluster."""

    def __init__(self, cluster: Cluster, watcher: Watcher, scale: Scale, document: str) -> None:
        self._cluster = cluster
        self._watcher = watcher
        self._scale = scale
        self._codec = TextCodec(cluster.model_dir)
        self._left_behind: dict[str, int] = {}
        self._client = Client(cluster.api_url, cluster.model_dir.name, timeout_s=scale.patience_s)
        tokens = self._codec.encode(document)[: scale.document_tokens]
        self._document = self._codec.decode(tokens).strip("\ufffd ")
        self._steps: tuple[tuple[str, Callable[[Step], None]], ...] = (
            ("Two questions about one document", self._reuse),
            ("Blocks loaded ahead of the question", self._prefetch),
            ("The serving instance killed in mid-sentence", self._instance_killed),
            ("The controller killed in mid-sentence", self._controller_killed),
            ("A context split over three instances, then over two", self._reshard),
            ("An instance drained, asleep and woken", self._sleep_and_wake),
        )

    def tell(self, begins: Callable[[Step], None], ended: Callable[[Step], None]) -> list[Step]:
        """Do all steps; each is told of when it begins and when it is over. A step that breaks is one
        that did not hold."""
        steps = []
        for number, (title, act) in enumerate(self._steps, 1):
            step = Step(number, title)
            begins(step)
            began = time.monotonic()
            self._watcher.mark("", str(number))
            try:
                self._mend()
                act(step)
            except Exception as error:  # whatever it is, the next steps are told too
                step.check("the step came to its end", False, f"{type(error).__name__}: {error}")
            step.took_s = time.monotonic() - began
            steps.append(step)
            ended(step)
        return steps

    # What the steps have in common

    def _mend(self) -> None:
        """Have every process running and every instance active, whatever the step before left behind."""
        for name, member in self._cluster.members.items():
            if not member.alive():
                self._restart(name)
        self._wake(INSTANCES)

    def _restart(self, name: str) -> None:
        self._cluster.restart(name, self._scale.patience_s)
        self._watcher.mark(name, "started")

    def _wake(self, names: Sequence[str]) -> None:
        """Have these instances active."""
        for name in names:
            self._cluster.ask_state(name, "active")
        self._cluster.wait_active(names, self._scale.patience_s)

    def _only(self, name: str) -> None:
        """Have an instance serve alone: the others get nothing new."""
        for other in INSTANCES:
            if other != name:
                self._cluster.ask_state(other, "draining")

    def _prompt(self, question: str) -> str:
        return f"{self._document}\n\n{question}"

    def _counted(self, name: str) -> dict[str, float]:
        return {
            instance: self._cluster.members[instance].metrics().get(f"kvsp_{name}_total", 0.0)
            for instance in INSTANCES
            if self._cluster.members[instance].alive()
        }

    def _ask(self, question: str, tokens: int, **more: object) -> tuple[Reply, str, dict[str, int]]:
        """Ask; return the reply, who served it, and what was cached, fetched and recomputed for it."""
        names = ("cached_tokens", "fetched_tokens", "recomputed_tokens", "instance_prefills")
        before = {name: self._counted(name) for name in names}
        reply = self._client.ask(self._prompt(question), max_tokens=tokens, **more)  # type: ignore[arg-type]
        after = {name: self._counted(name) for name in names}
        grown = {
            name: {i: int(after[name].get(i, 0) - before[name].get(i, 0)) for i in after[name]}
            for name in names
        }
        served = max(
            grown["instance_prefills"], key=lambda i: grown["instance_prefills"][i], default="nobody"
        )
        return reply, served, {name: sum(grown[name].values()) for name in names}

    def _running(self) -> SessionInfo | None:
        """Return the session that is running; None where there is none, or more than one."""
        found = [s for s in self._cluster.sessions().sessions if s.state in _UNDER_WAY]
        return found[0] if len(found) == 1 and found[0].instance is not None else None

    def _calm(self) -> None:
        """Wait until no session is under way and the controller knows that every instance is idle, so that
        the next question is placed by what is cached."""
        wait_until(self._cluster.idle, self._scale.patience_s, "the cluster to be idle")

    def _computed_alone(self, question: str, tokens: int) -> str:
        """Return the answer of an engine in this process that computes everything itself."""
        descriptor = self._cluster.descriptor
        engine = NumpyEngine(
            self._cluster.model_dir, kv_dtype=descriptor.kv_dtype, block_tokens=descriptor.block_tokens
        )
        prompt = self._codec.encode_chat([{"role": "user", "content": self._prompt(question)}])
        sampler = Sampler(method="greedy", params={"max_tokens": tokens}, seed=0, step=0, deterministic=True)
        engine.execute(StartSequence(sequence=1, tokens=prompt, cached_tokens=0, sampler=sampler))
        drawn: list[int] = []
        while True:
            for event in engine.step():
                if isinstance(event, TokensDecoded):
                    drawn += event.tokens
                elif isinstance(event, SequenceEnded):
                    stream = self._codec.stream()
                    return "".join(stream.push(token) for token in drawn) + stream.finish()

    def _prefix_keys(self) -> list[str]:
        """Return the keys of the blocks that every question about the document begins with."""
        chats = [
            self._codec.encode_chat([{"role": "user", "content": self._prompt(question)}])
            for question in QUESTIONS
        ]
        same = next(
            (n for n, tokens in enumerate(zip(*chats, strict=False)) if len(set(tokens)) > 1), len(chats[0])
        )
        keys, _ = block_keys(self._cluster.scope, self._cluster.descriptor, chats[0][:same])
        return [key.hex() for key in keys]

    # 1

    def _reuse(self, step: Step) -> None:
        tokens = self._scale.answer_tokens
        first, _, was = self._ask(QUESTIONS[0], tokens)
        keys = self._prefix_keys()
        blocks = len(keys)
        published_s = wait_until(
            lambda: self._cluster.found(keys) == blocks, self._scale.patience_s, "the blocks to be published"
        )
        self._calm()
        second, served, now = self._ask(QUESTIONS[1], tokens)
        expected = self._computed_alone(QUESTIONS[1], tokens)
        shared = blocks * self._cluster.descriptor.block_tokens
        step.figures = [
            ("time to first token", f"{first.first_s:.2f} s", f"{second.first_s:.2f} s"),
            ("prompt tokens", str(first.prompt_tokens), str(second.prompt_tokens)),
            ("from caches", str(was["cached_tokens"]), str(now["cached_tokens"])),
            ("computed", str(was["recomputed_tokens"]), str(now["recomputed_tokens"])),
            ("fetched from other holders", str(was["fetched_tokens"]), str(now["fetched_tokens"])),
            ("blocks published after", f"{published_s:.2f} s", ""),
        ]
        step.check(
            "the second question reuses every block of the document",
            second.cached_tokens >= shared and now["cached_tokens"] >= shared,
            f"{now['cached_tokens']} of {second.prompt_tokens} tokens from caches ({served})",
        )
        step.check(
            "it computes no more than its own tokens",
            now["recomputed_tokens"] <= second.prompt_tokens - shared,
            f"{now['recomputed_tokens']} tokens, the first question {was['recomputed_tokens']}",
        )
        step.check(
            "its answer is the one of an engine that computes everything itself",
            second.text == expected,
            f"{second.output_tokens} tokens",
        )

    # 2

    def _prefetch(self, step: Step) -> None:
        cluster, keys = self._cluster, self._prefix_keys()
        holder = max(INSTANCES, key=lambda name: self._counted("instance_prefills").get(name, 0.0))
        target = next(name for name in INSTANCES if name != holder)
        fetched = self._counted("fetched_tokens").get(target, 0.0)
        directive = PrefetchDirective(
            directive="01" * 16,
            scope_id=cluster.scope.scope_id,
            compat_id=cluster.descriptor.compat_id,
            blocks=tuple(
                PrefetchBlock(block_key=key, sources=(cluster.uris[holder], cluster.uris["cache"]))
                for key in keys
            ),
            deadline_ms=int(self._scale.patience_s * 1000),
            lease_ms=30_000,
        )
        controller = cluster.as_("controller")  # with its certificate, as it would itself
        leased = {name: self._leased(name) for name in (holder, "cache")}
        began = time.monotonic()
        uri = cluster.uris[target]
        expect_success(uri, controller.ask(uri, PrefetchBlocks(), directive))
        status = None
        while status is None or status.state == "pending":
            self._watcher.sample()
            status = controller.ask_for(DirectiveStatus, uri, GetDirective(directive.directive))
            if time.monotonic() - began > self._scale.patience_s:
                break
        took_s = time.monotonic() - began
        loaded = self._counted("fetched_tokens").get(target, 0.0) - fetched
        self._watcher.mark(target, "prefetched")
        step.check(
            f"{target} loads all blocks of the document from {holder}, before anybody asks",
            status.state == "complete" and len(status.loaded) == len(keys),
            f"{len(status.loaded)} of {len(keys)} blocks, {loaded:.0f} tokens fetched in {took_s:.2f} s",
        )
        sources = {name: self._leased(name) - count for name, count in leased.items()}
        step.check(
            "its sources kept them under lease meanwhile",
            sum(sources.values()) >= len(keys),
            ", ".join(f"{name} {count} blocks" for name, count in sources.items() if count),
        )
        self._only(target)
        reply, served, counts = self._ask(QUESTIONS[2], self._scale.answer_tokens)
        self._wake(INSTANCES)
        shared = len(keys) * cluster.descriptor.block_tokens
        step.check(
            f"the next question goes to {target} and uses them",
            served == target and reply.cached_tokens >= shared and counts["fetched_tokens"] == 0,
            f"served by {served}: {reply.cached_tokens} tokens from caches,"
            f" {counts['fetched_tokens']} fetched for it, first token after {reply.first_s:.2f} s",
        )

    def _leased(self, name: str) -> int:
        """Return how many blocks a holder has put under lease so far."""
        return int(self._cluster.members[name].metrics().get("kvsp_leased_blocks_total", 0))

    # 3

    def _instance_killed(self, step: Step) -> None:
        for method, temperature in (("greedy", 0.0), ("top-p", 1.0)):
            calm, seed = self._undisturbed(temperature)
            for _ in range(_TRIES):
                self._calm()
                reply, session = self._disturbed(temperature, seed)
                victim = self._cluster.name_of(session.instance)
                epoch = self._epoch_of(session)
                self._restart(victim)
                self._wake([victim])
                if epoch != session.epoch:
                    break  # else the answer was complete before its instance was gone
            step.check(
                f"{method}: another instance goes on, and its client does not notice",
                epoch > session.epoch and reply.reason in ("stop", "length"),
                f"{victim} killed; epoch {epoch}; longest silence {reply.longest_wait_s:.2f} s",
            )
            step.check(
                f"{method}: the answer is the undisturbed one, each token once",
                reply.text == calm.text and reply.output_tokens == calm.output_tokens,
                f"{reply.output_tokens} tokens, undisturbed {calm.output_tokens}",
            )

    def _disturbed(self, temperature: float, seed: int) -> tuple[Reply, SessionInfo]:
        """Ask, and kill who serves the answer in the middle of it; return which session that was."""
        killed: list[SessionInfo] = []

        def kill() -> None:
            session = self._running()
            if session is None:
                raise KVSPError("the answer was complete before its instance could be killed")
            victim = self._cluster.name_of(session.instance)
            self._cluster.kill(victim)
            self._left_behind[victim] = self._cluster.records_of(victim)
            self._watcher.mark(victim, "kill -9")
            killed.append(session)

        reply = self._client.ask(
            self._prompt(QUESTIONS[3]),
            max_tokens=self._scale.long_answer_tokens,
            temperature=temperature,
            seed=seed,
            after=self._scale.kill_after,
            then=kill,
        )
        if not killed:
            raise KVSPError(f"the answer had fewer than {self._scale.kill_after} pieces")
        return reply, killed[0]

    def _epoch_of(self, session: SessionInfo) -> int:
        return max(
            (s.epoch for s in self._cluster.sessions().sessions if s.session == session.session), default=0
        )

    def _undisturbed(self, temperature: float) -> tuple[Reply, int]:
        """Return an answer that is long enough to be disturbed, and its seed."""
        for seed in range(1, 20):
            reply, _, _ = self._ask(
                QUESTIONS[3], self._scale.long_answer_tokens, temperature=temperature, seed=seed
            )
            if reply.output_tokens > self._scale.long_answer_tokens // 2:
                break
        return reply, seed

    # 4

    def _controller_killed(self, step: Step) -> None:
        cluster = self._cluster
        calm, seed = self._undisturbed(0.0)
        self._calm()
        under_way: list[SessionInfo | None] = []

        def kill() -> None:
            under_way.append(self._running())
            cluster.kill("controller")
            self._watcher.mark("controller", "kill -9")
            cluster.launch("controller")

        reply = self._client.ask(
            self._prompt(QUESTIONS[3]),
            max_tokens=self._scale.long_answer_tokens,
            seed=seed,
            after=self._scale.kill_after,
            then=kill,
        )
        cluster.wait_ready("controller")
        self._watcher.mark("controller", "started")
        step.check(
            "the answer goes on and is the undisturbed one",
            reply.text == calm.text and reply.output_tokens == calm.output_tokens,
            f"{reply.output_tokens} tokens, longest silence {reply.longest_wait_s:.2f} s",
        )
        took_s = cluster.wait_active(INSTANCES, self._scale.patience_s)
        known = cluster.sessions().sessions
        step.check(
            "the controller knows its sessions and instances again",
            any(under_way) and {s.session for s in under_way if s} <= {s.session for s in known},
            f"{len(known)} sessions from its store, three instances after {took_s:.2f} s",
        )
        again, served, _ = self._ask(QUESTIONS[1], self._scale.answer_tokens)
        step.check(
            "it places the next question",
            again.reason in ("stop", "length") and again.output_tokens > 0,
            f"{again.output_tokens} tokens from {served}, {again.cached_tokens} from caches",
        )

    # 5

    def _reshard(self, step: Step) -> None:
        cluster = self._cluster
        tokens = self._codec.encode("Another text.\n\n" + self._document)
        context = SharedContext(cluster, tokens, self._scale.patience_s)
        whole = context.store()
        self._compute(step, context, whole, INSTANCES, "three")
        held = context.held(INSTANCES)
        step.check(
            "no instance holds the whole",
            max(held.values()) < len(context.keys) <= sum(held.values()),
            ", ".join(f"{name} {count}" for name, count in held.items()) + f" of {len(context.keys)} blocks",
        )
        before = self._counted("fetched_tokens")
        moved = self._compute(step, context, whole, INSTANCES[:2], "two")
        after = self._counted("fetched_tokens")
        fetched = int(sum(after.values()) - sum(before.values()))
        step.check(
            "what moves is the planner's minimum, and what is retained does not move",
            fetched == moved.moved_tokens == held[INSTANCES[2]] * cluster.descriptor.block_tokens,
            f"{fetched} tokens ({context.octets_of(fetched)} octets) of KV moved, planned"
            f" {moved.moved_tokens}; {moved.retained_tokens} retained",
        )
        context.end()

    def _compute(
        self, step: Step, context: SharedContext, whole: Array, names: Sequence[str], number: str
    ) -> Transition:
        """Split the context over instances, and compare the next token's logits with the unsharded ones."""
        began = time.monotonic()
        transition = context.split(names)
        took_s = time.monotonic() - began
        for name in names:
            self._watcher.mark(name, "shard")
        merged = context.logits()
        difference = float(np.abs(merged - whole).max())
        tolerance = _LOGITS_TOLERANCE[self._cluster.descriptor.kv_dtype]
        step.check(
            f"over {number} instances, the next token's logits are the unsharded ones",
            difference <= tolerance * float(np.abs(whole).max())
            and int(merged.argmax()) == int(whole.argmax()),
            ", ".join(f"{name} {count}" for name, count in context.shares().items())
            + f" tokens; largest difference {difference:.1e} of {float(np.abs(whole).max()):.3g};"
            f" split in {took_s:.2f} s",
        )
        return transition

    # 6

    def _sleep_and_wake(self, step: Step) -> None:
        cluster, name = self._cluster, INSTANCES[-1]
        began = time.monotonic()
        cluster.ask_state(name, "draining")
        self._watcher.mark(name, "drain")
        asleep_s = wait_until(
            lambda: cluster.state_of(name) == "sleeping", self._scale.patience_s, f"{name} to sleep"
        )
        step.check(f"{name} drains and sleeps", True, f"asleep {asleep_s:.2f} s after it was asked")
        _, served, _ = self._ask(QUESTIONS[1], self._scale.answer_tokens)
        step.check("meanwhile others serve", served != name, f"served by {served}")
        began = time.monotonic()
        cluster.ask_state(name, "active")
        self._watcher.mark(name, "wake")
        cluster.wait_active([name], self._scale.patience_s)
        step.check(f"{name} wakes", True, f"active {time.monotonic() - began:.2f} s after it was asked")
        self._only(name)
        reply, served, _ = self._ask(QUESTIONS[0], self._scale.answer_tokens)
        self._wake(INSTANCES)
        step.check(
            f"{name} serves again",
            served == name,
            f"{reply.output_tokens} tokens, {reply.cached_tokens} cached",
        )
        had = cluster.records_of(name)
        status, said = cluster.terminate(name, self._scale.patience_s)
        self._watcher.mark(name, "SIGTERM")
        # What an incarnation that was killed had published runs out by itself.
        left, old = cluster.records_of(name), self._left_behind.get(name, 0)
        step.check(
            f"{name}, told to stop, withdraws its records and says that it is safe",
            status == 0 and "safe to stop" in said and left < had and left <= old,
            f"exit status {status}; {had} records at the index before, {left} after, of {old} that it left"
            " behind when it was killed",
        )


def document(folder: Path = Path(__file__).parents[3] / "docs") -> str:
    """Return the text that is asked about: the project's own documentation, or what the package says."""
    for name in ("architecture.md", "decisions.md"):
        if (folder / name).is_file():
            return (folder / name).read_text()
    import kvsp_core.roles.role as role
    from kvsp_core import problems

    return "\n\n".join(_texts((role, problems)))


def _texts(modules: Sequence[object]) -> list[str]:
    return [str(getattr(module, "__doc__", "")) for module in modules]
