"""SamplesPerInsert: keeps collecting and learning in proportion.

    inserted · ratio - sampled          the number of rows the learner is behind
    ════════╤══════════════╤════════
      no sample          no rollout     learner and collector wait for each other, never both at once
    ◄─ -tolerance ─── 0 ─── +tolerance ─►

Both sides check before they act, and then act in full. So one of the two may always act, whatever the sizes of batches
and samples, and the tolerance is exceeded by at most one batch or one sample.
"""

from __future__ import annotations

from reap.buffers.arguments import number, whole
from reap.buffers.storage.ring import COUNT, SAMPLED, Ring
from reap.errors import Starved


class SamplesPerInsert:
    """Limits how many rows are sampled for each row that is written.

    >>> limiter = SamplesPerInsert(8, tolerance=10_000, min_size=1_000)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256, limiter=limiter)

    A background collector rests while the learner is behind. `sample` waits while the learner is ahead, and raises
    `Starved` if the collector is not running, or no row arrives for `timeout` seconds. Once the collector has made all
    its frames, or is shut down, the limiter no longer applies: samples are drawn at once, and not counted.

    Args:
        ratio: rows sampled per row written, on average.
        tolerance: how many sampled rows either side may be ahead; by default `1000 * ratio`.
        min_size: rows that must be written before the first sample; they do not count for the ratio.
        timeout: the most seconds `sample` waits.
    """

    def __init__(
        self, ratio: float, *, tolerance: float | None = None, min_size: int = 1, timeout: float = 60.0
    ) -> None:
        self.ratio, self.min_size = number(ratio, "ratio", 0, above=True), whole(min_size, "min_size", 1)
        self.timeout = number(timeout, "timeout", 0, above=True, endless=True)
        self.tolerance = 1000.0 * self.ratio if tolerance is None else number(tolerance, "tolerance", 0)

    def behind(self, ring: Ring) -> float:
        """Return how many rows the learner still has to sample; negative: it is ahead."""
        return (int(ring.words[COUNT]) - self.min_size) * self.ratio - int(ring.words[SAMPLED])

    def may_write(self, ring: Ring) -> bool:
        """Return whether more rows should be written now."""
        return int(ring.words[COUNT]) < self.min_size or self.behind(ring) <= self.tolerance

    def check(self, ring: Ring) -> None:
        """Raise `Starved` if a sample must wait."""
        written = int(ring.words[COUNT])
        if written < self.min_size:
            raise Starved(f"cannot sample: {written} rows are written, min_size is {self.min_size}")
        if self.behind(ring) < -self.tolerance:
            sampled = int(ring.words[SAMPLED])
            raise Starved(
                f"cannot sample: {sampled:,} rows were sampled and {written:,} written, at {self.ratio:g} samples per "
                f"row that is {-self.behind(ring):,.0f} too many (tolerance {self.tolerance:,.0f})"
            )

    def count(self, ring: Ring, rows: int) -> None:
        """Count this number of rows as sampled."""
        with ring.lock.locked():
            ring.words[SAMPLED] += rows

    def __repr__(self) -> str:
        return f"SamplesPerInsert({self.ratio:g}, tolerance={self.tolerance:g}, min_size={self.min_size})"
