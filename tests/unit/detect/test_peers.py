"""Who is compared with whom."""

import numpy as np
import pytest

from argus_otel.detect.peers import find_peers
from argus_otel.testing.cases import build_run


def groups_of(data):
    """Sets of ranks that are peers."""
    tables = build_run({"steps": 20, **data})
    samples = [tables.collectives]
    ranks = np.arange(data["ranks"])
    peers = find_peers(tables.ranks, tables.groups, samples, ranks, np.arange(20))
    return peers.source, sorted(tuple(row) for b in peers.buckets for row in b.tolist())


def test_known_topology_separates_stages_and_tensor_ranks():
    """Only the data-parallel position may differ."""
    data = {
        "ranks": 8,
        "topology": {
            "dp": [0, 0, 1, 1, 0, 0, 1, 1],
            "tp": [0, 1, 0, 1, 0, 1, 0, 1],
            "pp": [0, 0, 0, 0, 1, 1, 1, 1],
        },
    }

    assert groups_of(data) == ("topology", [(0, 2), (1, 3), (4, 6), (5, 7)])


def test_unknown_topology_falls_back_to_equal_work():
    """Ranks 2 and 3 move other amounts than 0 and 1."""
    big, small = [{"bytes": 1 << 24}], [{"bytes": 1 << 10}]
    data = {"ranks": 4, "collectives": {0: big, 1: big, 2: small, 3: small}}

    assert groups_of(data) == ("work signature", [(0, 1), (2, 3)])


def test_stages_are_told_apart_by_the_chain_of_their_partners():
    """Two pipelines of three stages; the middle and the ends send the same number of bytes."""

    def sends(*peers):
        return [{"op": "send", "peer": peer, "bytes": 4096} for peer in peers]

    data = {
        "ranks": 6,
        "collectives": {
            0: sends(2), 2: sends(4), 4: sends(2),
            1: sends(3), 3: sends(5), 5: sends(3),
        },
    }  # fmt: skip

    assert groups_of(data) == ("work signature", [(0, 1), (2, 3), (4, 5)])


@pytest.mark.parametrize("collectives", [{}, {0: [{}]}])
def test_without_topology_and_collectives_nobody_has_peers(collectives):
    """Nothing says what a rank does."""
    assert groups_of({"ranks": 4, "collectives": collectives})[1] == []
