"""How a global batch is split over processes and microbatches, and which sequences each of them reads.

Pure functions of the config's batch, the number of processes and `--microbatch`: no communication, no state.
A step always covers the same sequences, whatever the layout.
"""

from dataclasses import dataclass

from training.config import Batch
from training.errors import UserError


@dataclass(frozen=True)
class Layout:
    """One way to compute a global batch.

    The sequences of a step are cut into microbatches, contiguous, dealt to the processes in turn: microbatch
    k x world_size + rank is the k-th of a process. They are as even as possible: where the numbers divide evenly these
    are exactly the config's microbatches; else some hold one sequence less, or none. Or they are `whole`, the
    config's own microbatches whatever the number of processes, of which some then get one less, or none.
    """

    world_size: int
    accumulation: int
    global_batch: int
    whole: int | None = None
    """Size of the microbatches where only their owner may change, in bitwise mode."""

    def microbatches(self, rank: int, sequences: int | None = None) -> list[range]:
        """The microbatches of one process in one step.

        Args:
            rank: the process, 0 to world_size - 1.
            sequences: sequences in this step where they are fewer than the global batch.

        Returns:
            Positions within the step, 0 to sequences - 1; microbatches without a sequence are left out, so a
            process can have fewer than `accumulation`, even none.
        """
        total = self.global_batch if sequences is None else sequences
        if self.whole is not None:
            starts = range(rank * self.whole, total, self.world_size * self.whole)
            return [range(start, min(start + self.whole, total)) for start in starts]
        parts = self.world_size * self.accumulation
        size, larger = divmod(total, parts)
        ranges = []
        for k in range(self.accumulation):
            number = k * self.world_size + rank
            start = number * size + min(number, larger)
            ranges.append(range(start, start + size + (number < larger)))
        return [positions for positions in ranges if positions]

    @property
    def microbatch(self) -> int:
        """Sequences of the largest microbatch."""
        return self.whole or -(-self.global_batch // (self.world_size * self.accumulation))

    @property
    def idle_share(self) -> float:
        """Share of the processes' time spent waiting for the process with most sequences."""
        busiest = sum(len(positions) for positions in self.microbatches(0))
        return 1 - self.global_batch / (busiest * self.world_size)


def plan_layout(batch: Batch, world_size: int, microbatch: int | None = None, bitwise: bool = False) -> Layout:
    """Splits the config's global batch over the processes that were started.

    With the config's own number of processes and microbatch this is the config's layout. Otherwise each process
    takes as few microbatches as fit under `microbatch`, of as even a size as possible.

    Args:
        batch: the config's, which fixes the sequences per step.
        world_size: processes started.
        microbatch: most sequences in one forward and backward; None = the config's.
        bitwise: whether the config's microbatches stay as they are, and only their owners change.

    Raises:
        UserError: another microbatch than the config's in bitwise mode.
    """
    largest = microbatch if microbatch is not None else batch.microbatch
    if bitwise and largest != batch.microbatch:
        raise UserError(
            f"--microbatch {largest}: the config says {batch.microbatch}, and with reproducibility: bitwise it stays, "
            "as another size rounds otherwise; leave --microbatch out, or train with reproducibility: rounding"
        )
    global_batch = batch.world_size * batch.microbatch * batch.accumulation
    accumulation = -(-global_batch // (world_size * largest))
    return Layout(world_size, accumulation, global_batch, largest if bitwise else None)


def describe(layout: Layout, batch: Batch) -> str:
    """The one line that announces the layout, and that it is the same run where it is not the config's."""
    text = (
        f"{layout.global_batch} sequences per step = {layout.world_size} process{'es' * (layout.world_size > 1)} "
        f"x microbatch {layout.microbatch} x accumulation {layout.accumulation}"
    )
    if layout.world_size * layout.microbatch * layout.accumulation != layout.global_batch:
        text = text.replace(" = ", " over ") + f", uneven: {100 * layout.idle_share:.1f} % idle"
    busy = -(-layout.global_batch // (layout.whole or 1))
    if layout.world_size > busy:
        text += f", no sequence for ranks from {busy} on"
    if (layout.world_size, layout.microbatch, layout.accumulation) == (
        batch.world_size,
        batch.microbatch,
        batch.accumulation,
    ):
        return text
    return f"{text} (the config says {batch.world_size} x {batch.microbatch} x {batch.accumulation}: the same run)"
