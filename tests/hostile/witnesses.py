"""Load on a cluster, by threads that remember what they were promised and compare it with what they get."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import attrs
import openai

from kvsp_core.answers import read_answer
from kvsp_core.errors import KVSPError
from kvsp_core.ext_messages import PlacementAnswer, PlacementRequest, ScopedPrefix, SessionInfo
from kvsp_core.messages import CheckpointRecorded
from kvsp_core.problems import Problem
from kvsp_core.records import Sampler, SessionCheckpoint
from kvsp_core.resources import DeleteSession, GetSession, PlaceRequest, RecordCheckpoint
from kvsp_services.demo.client import Client, Reply
from tests.hostile.world import Block, Question, World

PAUSE_S = 0.04
"""Between two steps of a witness, at most: there is load, and time for those who are loaded."""

__all__ = ["Blocks", "Ledger", "Load", "Streams", "Tally"]


@attrs.define
class Tally:
    """What was counted, and every breach of a promise in a line."""

    counts: Counter[str] = attrs.field(factory=Counter)
    broken: list[str] = attrs.field(factory=list)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def add(self, what: str, count: int = 1) -> None:
        """Count something."""
        with self._lock:
            self.counts[what] += count

    def breach(self, what: str) -> None:
        """Note that a promise was broken."""
        with self._lock:
            self.broken.append(what)


class Streams:
    """Asks questions at the front end; each answer has to be the undisturbed one, each token once.

    A stream that is cut because the front end itself is gone has to be a beginning of it.
    """

    REFUSED = "questions refused in time by a front end that lives"

    def __init__(self, world: World, questions: list[Question], tally: Tally, front_gone: Callable[[], int]):
        """`front_gone` counts how often the front end was killed and how often it was whole again."""
        self._client = Client(world.api_url, world.model_dir.name, timeout_s=120)
        self.questions = questions
        self._tally = tally
        self._front_gone = front_gone

    def step(self, drawn: random.Random) -> None:
        """Ask once."""
        question, before = drawn.choice(self.questions), self._front_gone()
        reply = Reply()
        try:
            self._client.ask(question.prompt, max_tokens=question.max_tokens, into=reply)
        except (openai.OpenAIError, OSError) as error:
            self._cut(reply.text, question, self._gone_since(before), type(error).__name__, str(error))
            return
        except Exception as error:  # httpx says it in its own words when a stream breaks off
            if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore"):
                raise
            self._cut(reply.text, question, self._gone_since(before), type(error).__name__, str(error))
            return
        if reply.reason not in ("stop", "length"):
            self._cut(reply.text, question, self._gone_since(before), "it broke off")
        elif (reply.text, reply.output_tokens) != (question.text, question.tokens):
            self._tally.breach(f"an answer of {reply.output_tokens} tokens is not the undisturbed one")
        else:
            self._tally.add("answers whole")
            self._tally.add("tokens", reply.output_tokens)

    def _gone_since(self, before: int) -> bool:
        """Return whether the front end was killed since, or was not whole again yet."""
        return self._front_gone() != before or before % 2 == 1

    def _cut(self, text: str, question: Question, front_gone: bool, why: str, detail: str = "") -> None:
        if not question.text.startswith(text):
            self._tally.breach("a part of an answer is not the beginning of the undisturbed one")
        elif front_gone:
            self._tally.add(f"{'answers cut' if text else 'questions refused'}, their front end killed")
            time.sleep(0.05)
        elif why == "InternalServerError" and not text:
            self._tally.add(self.REFUSED)  # after it has tried for as long as it does, before any promise
        else:
            said = f"{why}: {detail}" if detail else why
            self._tally.breach(f"an answer ended after {len(text)} characters ({said}), its front end alive")


class Blocks:
    """Stores blocks at the cache, fetches them and looks them up: nothing else may ever come back."""

    def __init__(self, world: World, tally: Tally) -> None:
        self._world = world
        self._tally = tally
        self._lock = threading.Lock()
        self.kept: list[Block] = []
        self.forgets = False
        """Whether the cache is small, so that blocks are not there any more after a while."""

    def step(self, drawn: random.Random) -> None:
        """Store a block, or ask for one."""
        choice = drawn.random()
        # Seldomer the more there are: each has to be refreshed at the index in time, however long it lasts.
        if choice < 0.3 / (1 + len(self.kept) / 200) or not self.kept:
            self.store(drawn)
        elif choice < 0.8:
            with self._lock:
                block = drawn.choice(self.kept)
            self.check(block)
        else:
            with self._lock:
                some = drawn.sample(self.kept, min(4, len(self.kept)))
            self._look_up(some)

    def store(self, drawn: random.Random) -> Block | None:
        """Store a new block; return it where it was taken."""
        block = self._world.new_block(drawn)
        response = self._world.store(block)
        if not response.is_success:
            self._tally.add("blocks refused")
            return None
        with self._lock:
            self.kept.append(block)
            if self.forgets:
                del self.kept[:-100]
        self._tally.add("blocks stored")
        return block

    def check(self, block: Block) -> bool:
        """Fetch a block; return whether it was there."""
        answer = self._world.fetch(block.key)
        if answer.response.status == 200:
            self._tally.add("blocks fetched")
            if answer.body != block.octets:
                self._tally.breach("a block came back with other octets")
        elif answer.response.status != 404:
            self._tally.add("fetches refused")
        return answer.response.status == 200

    def check_some(self, drawn: random.Random, count: int = 25) -> int:
        """Fetch some blocks; return how many are not there, which are forgotten."""
        with self._lock:
            some = drawn.sample(self.kept, min(count, len(self.kept)))
        lost = [block for block in some if not self.check(block)]
        with self._lock:
            self.kept = [block for block in self.kept if block not in lost]
        return len(lost)

    def _look_up(self, blocks: list[Block]) -> None:
        found = self._world.look_up([block.key for block in blocks])
        self._tally.add("lookups")
        for block, match in zip(blocks, found.blocks, strict=False):
            for replica in match.replicas:
                if (replica.block_key, replica.digest) != (block.key, block.digest):
                    self._tally.breach("a record says something else than what was stored")
                if replica.holder != self._world.uris["cache"]:
                    self._tally.breach("a record names a holder that was never given the block")


@attrs.define
class _Session:
    session: str
    epoch: int
    instance: str
    offset: int = -1
    """Of the newest acknowledged checkpoint; -1 where there is none."""
    closed: bool = False
    since_s: float = attrs.field(factory=time.monotonic)


class Ledger:
    """Places sessions as the front end and writes their checkpoints as the instance they were placed at.

    What the controller has acknowledged it has to know later: a placement, a checkpoint, an end.
    """

    MAX_TOKENS = 60

    def __init__(self, world: World, tally: Tally) -> None:
        self._world = world
        self._tally = tally
        self._lock = threading.Lock()
        self._sessions: list[_Session] = []

    def step(self, drawn: random.Random) -> None:
        """Open a session, write checkpoints, perhaps end it."""
        world = self._world
        prefix = ScopedPrefix(scope_id=world.scope.scope_id, block_keys=(drawn.randbytes(32).hex(),))
        request = PlacementRequest(
            compat_id=world.descriptor.compat_id, prefixes=(prefix,), token_count=20, deterministic=True
        )
        answer = world.ask("front", "controller", PlaceRequest(), request)
        placed = read_answer(PlacementAnswer, answer.response, answer.body)
        if isinstance(placed, Problem):
            self._tally.add("placements refused")
            return
        session = _Session(placed.session, placed.epoch, world.name_of(placed.instance))
        with self._lock:
            self._sessions.append(session)
        self._tally.add("placements")
        for count in range(5, 5 * drawn.randint(2, 8), 5):
            if not self._write(session, count, prefix):
                return
        if drawn.random() < 0.3:
            answer = world.ask("front", "controller", DeleteSession(session.session))
            session.closed = answer.response.is_success
            self._tally.add("ends acknowledged", int(session.closed))

    def _write(self, session: _Session, count: int, prefix: ScopedPrefix) -> bool:
        checkpoint = SessionCheckpoint(
            session=session.session,
            epoch=session.epoch,
            compat_id=self._world.descriptor.compat_id,
            scope_id=prefix.scope_id,
            prompt_blocks=prefix.block_keys,
            prompt_tail=(9, 10, 11, 12),
            generated=tuple(range(10, 10 + count)),
            output_offset=count,
            sampler=Sampler(
                method="greedy",
                params={"max_tokens": self.MAX_TOKENS},
                seed=0,
                step=count,
                deterministic=True,
            ),
        )
        operation = RecordCheckpoint(session.session)
        answer = self._world.ask(session.instance, "controller", operation, checkpoint)
        recorded = read_answer(CheckpointRecorded, answer.response, answer.body)
        if isinstance(recorded, Problem):
            self._tally.add("checkpoints refused")  # another incarnation owns the session now
            return False
        session.offset = recorded.output_offset
        session.since_s = time.monotonic()
        self._tally.add("checkpoints acknowledged")
        return True

    def known(self) -> list[str]:
        """Return the sessions there are."""
        with self._lock:
            return [session.session for session in self._sessions]

    def check(self) -> int:
        """Ask the controller for every session; return how many of its promises it does not know."""
        lost = 0
        with self._lock:
            young = [s for s in self._sessions if time.monotonic() - s.since_s < 50]  # then it may forget
            self._sessions = young
        for session in young:
            offset, epoch, closed = session.offset, session.epoch, session.closed
            answer = self._world.ask("front", "controller", GetSession(session.session))
            info = read_answer(SessionInfo, answer.response, answer.body)
            if isinstance(info, Problem):
                wrong = f"is not known any more ({info.status})"
            elif info.epoch < epoch:
                wrong = f"is in epoch {info.epoch}, {epoch} was acknowledged"
            elif info.output_offset < offset:
                wrong = f"is at token {info.output_offset}, {offset} was acknowledged"
            elif closed and info.state not in ("finished", "cancelled"):
                wrong = f"is {info.state}, its end was acknowledged"
            else:
                continue
            lost += 1
            self._tally.breach(f"a session {wrong}")
        return lost


class Load:
    """Threads that repeat the steps of witnesses until they are stopped. A context."""

    def __init__(self, tally: Tally, steps: list[Callable[[random.Random], None]], seed: int = 1) -> None:
        self._tally = tally
        self._stopped = threading.Event()
        self._calm = threading.Event()
        self._calm.set()
        self._threads = [
            threading.Thread(target=self._run, args=(step, random.Random(f"{seed}-{n}")), daemon=True)
            for n, step in enumerate(steps)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=150)

    def _run(self, step: Callable[[random.Random], None], drawn: random.Random) -> None:
        while not self._stopped.is_set():
            try:
                step(drawn)
                time.sleep(drawn.random() * PAUSE_S)
            except KVSPError:
                self._tally.add("requests without an answer")
                time.sleep(0.05)
            except Exception as error:
                self._tally.breach(f"a witness broke: {type(error).__name__}: {error}")
                return
