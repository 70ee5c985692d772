"""Kernel durations in the digest: the largest (kernel, stream, phase) and all others as one.

``argus.digest.kernels`` is a sketch (``wire/sketch``) of at most ``MAX_KEYS`` rows and one of the
rest, base64, in attributes of at most 2,000 characters; ``argus.kernel.names`` are the names that it
points into. Names travel with every digest: they are few and short, gzip makes nearly nothing of
what a request repeats, and a digest that gets lost costs no other one its names. Phases are those of
the digest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.semconv import names
from argus_otel.wire.packed import get_packed, put_packed
from argus_otel.wire.sketch import (
    Rows,
    Sketch,
    decode_sketch,
    encode_sketch,
    sketch_of_rows,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from argus_otel.wire.packed import AttributeValue

MAX_KEYS: Final = 8
"""Rows of their own; by then the largest hold nearly all of the time."""

MAX_CHARACTERS: Final = 2_700
"""Of the packed sketch and its names together, a rank and step."""

MAX_NAME: Final = 64
"""Characters of a name; demangled ones of templates run to thousands."""

REST: Final = "other kernels"
"""The name of what is not among the largest; its stream and phase are not known."""


def fold_kernels(sketch: Sketch, keys: int = MAX_KEYS) -> Sketch:
    """The rows with the most time, and one of all others under the name ``REST``.

    Args:
        sketch: Any; one that was folded before stays as it is.
        keys: Rows to keep, the one of the rest not counted.

    Returns:
        With a dictionary of the names in use, shortened to ``MAX_NAME``.
    """
    is_rest = np.array([name == REST for name in sketch.names], dtype=bool)[sketch.name]
    order = np.argsort(np.where(is_rest, -1.0, sketch.totals_ns), kind="stable")[::-1]
    kept = np.zeros(sketch.name.size, dtype=bool)
    kept[order[:keys]] = True
    kept &= ~is_rest
    used = [sketch.names[code][:MAX_NAME] for code in np.unique(sketch.name[kept]).tolist()]
    # Two names may be one when they have been shortened.
    dictionary = tuple(dict.fromkeys([*used, *([] if kept.all() else [REST])]))
    code_of = {name: code for code, name in enumerate(dictionary)}
    name = np.array(
        [
            code_of[sketch.names[code][:MAX_NAME] if stays else REST]
            for code, stays in zip(sketch.name.tolist(), kept.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    return sketch_of_rows(
        _rows_of(sketch),
        name,
        np.where(kept, sketch.stream, 0),
        np.where(kept, sketch.phase, -1),
        names=dictionary,
        phases=sketch.phases,
    )


def pack_kernels(sketch: Sketch, phases: Sequence[str]) -> dict[str, AttributeValue]:
    """Attributes of a digest; none where there are no kernels.

    What is too long keeps fewer rows of its own. Where not even two fit it is left out: the sizes
    of kernels would have to be spread over six orders of magnitude.

    Args:
        sketch: Of one rank in one step.
        phases: The digest's dictionary of phases. Those of the sketch are a part of it; others
            become unknown.

    Cost:
        Background thread. About 0.2 ms.
    """
    code_of = {name: code for code, name in enumerate(phases)}
    codes = np.array([*(code_of.get(name, -1) for name in sketch.phases), -1], dtype=np.int64)
    sketch = replace(sketch, phase=codes[sketch.phase], phases=tuple(phases))
    keys = MAX_KEYS
    while sketch.name.size and keys > 1:
        folded = fold_kernels(sketch, keys)
        data = encode_sketch(folded)
        # Base64 makes four characters of three bytes.
        if -(-len(data) // 3) * 4 + sum(map(len, folded.names)) <= MAX_CHARACTERS:
            attributes: dict[str, AttributeValue] = {names.ARGUS_KERNEL_NAMES: list(folded.names)}
            put_packed(attributes, names.ARGUS_DIGEST_KERNELS, data)
            return attributes
        keys -= 2
    return {}


def read_kernels(
    attributes: Mapping[str, AttributeValue], dictionary: Sequence[str], phases: Sequence[str]
) -> Sketch:
    """Read back what ``pack_kernels`` made.

    Args:
        attributes: Of a ``rank.step`` span that has ``argus.digest.kernels``.
        dictionary: Its ``argus.kernel.names``.
        phases: As in ``pack_kernels``.

    Raises:
        ValueError: Damaged, or of a version that this reader does not know.
    """
    data = get_packed(attributes, names.ARGUS_DIGEST_KERNELS)
    try:
        return decode_sketch(data, dictionary, phases)
    except ValueError as error:
        msg = f"{names.ARGUS_DIGEST_KERNELS} is damaged: {error}"
        raise ValueError(msg) from error


def _rows_of(sketch: Sketch) -> Rows:
    return Rows(
        filled=np.bincount(sketch.row, minlength=sketch.name.size),
        bucket=sketch.bucket,
        count=sketch.count,
        place_sum=sketch.place_sum,
        error_per_mille=sketch.error_per_mille,
    )
