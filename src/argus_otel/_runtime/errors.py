"""Errors that say what happened, where, what was expected, and what to do now."""

from __future__ import annotations


class ArgusError(Exception):
    """Something a person did, or that a part they run did, which argus cannot go on from.

    ``exit_code`` is what a command returns when this error ends it.
    """

    exit_code = 2

    def __init__(self, where: str, *, got: str, expected: str, fix: str) -> None:
        self.where = where
        self.got = got
        self.expected = expected
        self.fix = fix
        super().__init__(f"{where} is {got}; expected {expected}.\n{fix}")


class ConfigError(ArgusError):
    """A setting or argument has a value that cannot be used."""


class StoreError(ArgusError):
    """A store could not be read: down, refused, or not a store."""

    exit_code = 4
