"""What the tests of the store share: jobs in miniature, and how they are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from argus_otel.store.spans import Span, read_request
from argus_otel.testing.otlp import digest_request, example_digest, resource_of


@pytest.fixture
def job_spans() -> Callable[..., list[Span]]:
    """Spans of some steps of a small data-parallel job, as a store receives them."""

    def make(steps=range(3), ranks=range(4), digest=example_digest, **resource: Any) -> list[Span]:
        world_size = resource.pop("world_size", 4)
        spans: list[Span] = []
        for rank in ranks:
            digests = [digest(ordinal, rank) for ordinal in steps]
            identity = resource_of(rank, world_size=world_size, **resource)
            spans += read_request(digest_request(digests, identity))
        return spans

    return make


@pytest.fixture
def post() -> Callable[..., httpx.Response]:
    """Post a body to a receiver as an OTLP sender does."""
    with httpx.Client(trust_env=False, timeout=60) as client:

        def send(receiver, content: Any, path: str = "/v1/traces", **headers: str):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return client.post(
                receiver.endpoint + path,
                content=content,
                headers={"Content-Type": "application/x-protobuf"} | named,
            )

        yield send
