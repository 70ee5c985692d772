"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``, ``0 ranks``; for nouns that take an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def stretch(noun: str, first: int, last: int) -> str:
    """``step 5``, ``steps 5 to 9``."""
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


def listed(noun: str, numbers: list[int]) -> str:
    """``rank 2``, ``ranks 2, 3``."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
