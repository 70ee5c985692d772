"""In which order a pipeline stage works through its micro-batches."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """One micro-batch's pass through one chunk of a stage."""

    stage: int
    backward: bool
    chunk: int
    micro_batch: int


def stage_order(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Work]:
    """Passes of a stage in order: 1F1B, interleaved where a stage holds several chunks.

    As Megatron-LM schedules them (Narayanan et al., 2021): some forward passes to fill the
    pipeline, then one forward and one backward in turn, then the rest of the backward passes.

    Args:
        stage: From 0.
        stages: Stages of the pipeline.
        micro_batches: In a step; a multiple of ``stages`` where ``chunks`` > 1.
        chunks: Chunks of the model on each stage.
    """
    total = micro_batches * chunks
    if chunks == 1:
        warm_up = min(stages - stage - 1, total)
    elif micro_batches == stages:
        warm_up = total
    else:
        warm_up = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)

    def nth(index: int, *, backward: bool) -> Work:
        if chunks == 1:
            return Work(stage, backward, 0, index)
        # Blocks of ``stages`` micro-batches go through all chunks before the next block.
        block, place = divmod(index, stages * chunks)
        chunk, micro_batch = divmod(place, stages)
        return Work(
            stage, backward, chunks - 1 - chunk if backward else chunk, block * stages + micro_batch
        )

    order = [nth(index, backward=False) for index in range(warm_up)]
    for index in range(total - warm_up):
        order.append(nth(warm_up + index, backward=False))
        order.append(nth(index, backward=True))
    order += [nth(index, backward=True) for index in range(total - warm_up, total)]
    return order


def source(work: Work, stages: int, chunks: int) -> Work | None:
    """The pass whose result this one needs from another stage; None where it needs none.

    The last chunk's backward pass follows from its own forward pass, on the same rank.
    """
    step = 1 if work.backward else -1
    stage, chunk = work.stage + step, work.chunk
    if not 0 <= stage < stages:
        chunk += step
        stage %= stages
    if not 0 <= chunk < chunks:
        return None
    return work._replace(stage=stage, chunk=chunk)


def dependency_order(stages: int, micro_batches: int, chunks: int = 1) -> list[Work]:
    """All passes of all stages, each after what it needs.

    Raises:
        ValueError: The stages' orders wait for each other in a circle.
    """
    waiting = [stage_order(stage, stages, micro_batches, chunks) for stage in range(stages)]
    at = [0] * stages
    done: set[Work] = set()
    ordered: list[Work] = []
    while len(ordered) < 2 * stages * micro_batches * chunks:
        before = len(ordered)
        for stage, order in enumerate(waiting):
            while at[stage] < len(order):
                work = order[at[stage]]
                needs = source(work, stages, chunks)
                if needs is not None and needs not in done:
                    break
                done.add(work)
                ordered.append(work)
                at[stage] += 1
        if len(ordered) == before:
            msg = f"no pipeline of {stages} stages can run {micro_batches} micro-batches like this"
            raise ValueError(msg)
    return ordered
