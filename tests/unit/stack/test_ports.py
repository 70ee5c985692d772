"""Ports: the usual ones where they are free, others where not, never one twice."""

from __future__ import annotations

import socket

import pytest

from argus_otel.stack import ports as ports_module
from argus_otel.stack.errors import StartFailedError
from argus_otel.stack.ports import COLLECTOR_PORTS, HOST, JAEGER_PORTS, choose_ports


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def free():
    """A port that was free a moment ago."""
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    return port


def test_a_free_usual_port_is_taken(free):
    """People find 4317 where they expect it."""
    assert choose_ports({"otlp_grpc": free}, prefer_usual=True) == {"otlp_grpc": free}


def test_a_taken_usual_port_is_replaced(taken):
    """Somebody's own Collector on 4317 is left alone."""
    chosen = choose_ports({"otlp_grpc": taken}, prefer_usual=True)

    assert chosen["otlp_grpc"] != taken


def test_tests_never_get_the_usual_ports(free):
    """A test must not talk to the stack of whoever is logged in."""
    assert choose_ports({"otlp_grpc": free}, prefer_usual=False)["otlp_grpc"] != free


def test_two_names_with_one_usual_port_get_two_ports(free):
    """The first keeps it."""
    chosen = choose_ports({"one": free, "other": free}, prefer_usual=True)

    assert chosen["one"] == free
    assert chosen["other"] != free


def test_all_usual_ports_differ():
    """Collector and Jaeger run side by side."""
    usual = [*COLLECTOR_PORTS.values(), *JAEGER_PORTS.values()]

    assert len(set(usual)) == len(usual)


def test_no_free_port_is_an_error_that_says_which(monkeypatch, taken):
    """Instead of a Collector that does not start."""
    monkeypatch.setattr(ports_module, "_FREE_FROM", taken)
    monkeypatch.setattr(ports_module, "_FREE_TO", taken + 1)

    with pytest.raises(StartFailedError, match="a port for health"):
        choose_ports({"health": taken}, prefer_usual=True)
