"""Who comes last to the collectives of a run that is too short to say why.

One profiled step has no history and too few values for a verdict; that others waited for one of its ranks
is in it all the same.

Shape legend: A = steps, L = lanes (see ``operations``), R = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.tables.findings import LastToArrive

if TYPE_CHECKING:
    from argus_otel.detect.run import Run


def last_to_arrive(run: Run) -> LastToArrive | None:
    """The rank whose lateness the others waited for most.

    Returns:
        None where a rank of the job was not seen, or of no collective all ends are known: somebody
        is always the last of those seen, and the last of all may be another.
    """
    if run.ranks_R.size < run.world_size or not run.groups:
        return None
    seen = run.operations
    size_G = np.array([group.members.size for group in run.groups])
    known_AL = (seen.last_AL >= 0) & (seen.group_L >= 0) & (seen.members_AL == size_G[seen.group_L])
    last = seen.last_AL[known_AL]
    if not last.size:
        return None
    # Whoever comes last hardly waits: its time is the transfer alone.
    waited = np.nan_to_num((seen.longest_AL - seen.transfer_AL)[known_AL])
    waited_R = np.bincount(last, weights=waited, minlength=run.ranks_R.size)
    worst = int(waited_R.argmax())
    if waited_R[worst] <= 0:
        return None
    return LastToArrive(
        rank=int(run.ranks_R[worst]),
        collectives=int(np.count_nonzero(last == worst)),
        of=int(last.size),
        waited_s=float(waited_R[worst] / run.ordinals_A.size),
    )
