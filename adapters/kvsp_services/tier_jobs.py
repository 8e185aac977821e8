"""What a role asks of its tiers: jobs, in threads where a tier takes its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from kvsp_core.roles.role import (
    Drop,
    Input,
    JobDone,
    JobFailed,
    JobFault,
    Load,
    ReadBlock,
    Store,
    StoredBlock,
)
from kvsp_services.buffers import BlockBuffer
from kvsp_services.ports import Loop
from kvsp_services.request_log import RequestLog
from kvsp_services.stores.blocks import BlockFault, BlockTier, RangeDigests

__all__ = ["TierJobs", "block_done"]

TierJob: TypeAlias = Store | ReadBlock | Load


class TierJobs:
    """Carries out the jobs of one role, those of a block in turn.

    `tell` hands what became of each to the role, in the loop's thread. Why a tier does not work is said to
    `log`, since a role only hears that it does not.
    """

    def __init__(
        self,
        tiers: Mapping[str, BlockTier],
        loop: Loop,
        tell: Callable[[Input], None],
        log: RequestLog | None,
    ) -> None:
        self._tiers = tiers
        self._loop = loop
        self._tell = tell
        self._log = log
        self._ranges = RangeDigests()

    def begin(self, job: TierJob, buffer: BlockBuffer | None) -> None:
        """Do a job; `buffer` is where its block is, or comes to."""
        tier = self._tiers.get(job.tier)
        if tier is None:
            self._tell(JobFailed(job.job_id, JobFault.BROKEN))
            return
        if buffer is not None:
            buffer.use()

        def work() -> None:
            over = partial(self._over, job.tier, buffer, *self._outcome(job, tier, buffer))
            if tier.blocking:
                self._loop.call_soon_threadsafe(over)
            else:
                over()

        self._run(tier, None if isinstance(job, Load) else job.name, work)

    def drop(self, effect: Drop) -> None:
        """Have a block removed; nothing is heard of that."""
        if tier := self._tiers.get(effect.tier):
            self._run(tier, effect.name, partial(tier.drop, effect.name))

    def _run(self, tier: BlockTier, order: object, work: Callable[[], None]) -> None:
        if tier.blocking:
            self._loop.in_thread(order, work)
        else:
            work()

    def _outcome(
        self, job: TierJob, tier: BlockTier, buffer: BlockBuffer | None
    ) -> tuple[JobDone | JobFailed, BaseException | None]:
        """Do a job; return what becomes of it, and why where the tier does not work."""
        try:
            return self._done(job, tier, buffer), None
        except BlockFault as fault:
            why = fault.__cause__ or fault if fault.fault is JobFault.BROKEN else None
            return JobFailed(job.job_id, fault.fault), why
        except MemoryError:
            return JobFailed(job.job_id, JobFault.BUSY), None
        except Exception as error:
            return JobFailed(job.job_id, JobFault.BROKEN), error

    def _done(self, job: TierJob, tier: BlockTier, buffer: BlockBuffer | None) -> JobDone:
        if isinstance(job, Load):
            return JobDone(job.job_id, catalogue=tier.catalogue())
        assert buffer is not None
        if isinstance(job, ReadBlock):
            block, data = tier.read(job.name, job.layers, buffer.acquire)
            layers, repr_digest = block.header.layers, block.repr_digest
            if len(layers) < len(block.layer_digests):  # a part is a container with its own digest
                repr_digest = self._ranges.of(block, data)
            buffer.fill(block.header, data, block.layer_digests[layers.start : layers.stop], repr_digest)
            return block_done(job.job_id, buffer)
        if buffer.header is None:
            raise BlockFault(JobFault.CORRUPT)
        block = StoredBlock(job.name, buffer.header, buffer.layer_digests, buffer.repr_digest)
        if tier.store(block, buffer.data):
            buffer.keep()
        return JobDone(job.job_id)

    def _over(
        self,
        tier: str,
        buffer: BlockBuffer | None,
        outcome: JobDone | JobFailed,
        why: BaseException | None,
    ) -> None:
        if buffer is not None:
            buffer.free()
        if why is not None and self._log is not None:
            self._log.tier_failed(tier, why, now_ms=self._loop.now_ms())
        self._tell(outcome)


def block_done(job: int, buffer: BlockBuffer) -> JobDone:
    """Return that a job is done which has brought the block in a buffer."""
    return JobDone(job, buffer.header, buffer.layer_digests, buffer.repr_digest)
