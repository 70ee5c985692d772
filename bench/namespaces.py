"""Several hosts on this one: network namespaces with names of their own, joined by a bridge.

Each host has one link of a given rate to the bridge, shaped in both directions by ``tc tbf``; the
bridge is in a namespace too, and what receives the telemetry runs there. This machine's own network
is not touched. Nothing has to be taken down: a namespace ends with its last process, and all
processes end with this one, however that ends.

Needs root, ``ip`` and ``tc`` (iproute2), ``unshare``, ``nsenter`` and ``setpriv`` (util-linux).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs import JobError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LINK = "eth0"
"""What a host's link is called inside it."""

BRIDGE_ADDRESS = "10.77.0.254"
_NEEDED = {
    "ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux",
    "setpriv": "util-linux",
}  # fmt: skip
_ENDS_SOON_S = 20


class NoNamespacesError(JobError):
    """Namespaces or shaped links cannot be had here; the message says what is missing."""


def missing() -> str | None:
    """What keeps this machine from having hosts of its own; None where nothing does."""
    if os.geteuid() != 0:
        return f"root (this is user {os.geteuid()}): run it with sudo, or in a container as root"
    for tool, package in _NEEDED.items():
        if shutil.which(tool) is None:
            return f"the command {tool!r}: install the package {package}"
    try:
        with _holder("argus-probe") as probe:
            _run(
                probe.inside(
                    "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"
                )
            )
            _run(probe.inside("tc", *_tbf("probe0", 100)))
    except NoNamespacesError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host; it is there as long as the network is."""

    name: str
    address: str
    pid: int
    """Of the process that keeps its namespaces."""

    def inside(self, *command: str) -> list[str]:
        """A command, to be run on this host; it ends with whoever started it."""
        enter = ("nsenter", "--target", str(self.pid), "--net", "--uts", "--")
        return ["setpriv", "--pdeathsig", "TERM", *enter, *command]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Hosts, and the bridge between them."""

    hosts: tuple[Host, ...]
    bridge: Host

    def set_rate(self, number: int, megabit: float) -> None:
        """Shape a host's link to so many Mbit/s, out and in."""
        _run(self.hosts[number].inside("tc", *_tbf(LINK, megabit)))
        _run(self.bridge.inside("tc", *_tbf(f"port{number}", megabit)))


@contextmanager
def network(count: int, megabit: float) -> Iterator[Network]:
    """Make hosts whose links all have one rate, for the time of the block.

    Raises:
        NoNamespacesError: The system refuses; the message says what it said.
    """
    with ExitStack() as stack:
        bridge = stack.enter_context(_holder("bridge", BRIDGE_ADDRESS))
        _run(bridge.inside("ip", "link", "add", "bridge", "type", "bridge"))
        _run(bridge.inside("ip", "address", "add", f"{BRIDGE_ADDRESS}/24", "dev", "bridge"))
        _run(bridge.inside("ip", "link", "set", "bridge", "up"))
        hosts = []
        for number in range(count):
            host = stack.enter_context(_holder(f"node-{number}", f"10.77.0.{number + 1}"))
            port = f"port{number}"
            peer = ("peer", "name", LINK, "netns", str(host.pid))
            _run(bridge.inside("ip", "link", "add", port, "type", "veth", *peer))
            _run(bridge.inside("ip", "link", "set", port, "master", "bridge", "up"))
            _run(host.inside("ip", "address", "add", f"{host.address}/24", "dev", LINK))
            _run(host.inside("ip", "link", "set", LINK, "up"))
            hosts.append(host)
        made = Network(hosts=tuple(hosts), bridge=bridge)
        for number in range(count):
            made.set_rate(number, megabit)
        yield made


@contextmanager
def _holder(name: str, address: str = "") -> Iterator[Host]:
    """A process in network and host-name namespaces of its own, which ends when we let it go."""
    wait = f"hostname {name} && ip link set lo up && echo ready && read _"
    process = subprocess.Popen(
        [shutil.which("unshare") or "unshare", "--net", "--uts", "sh", "-c", wait],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr  # noqa: S101
    try:
        if process.stdout.readline().strip() != "ready":
            msg = f"network namespaces: {process.stderr.read().strip() or 'unshare failed'}"
            raise NoNamespacesError(msg)
        yield Host(name=name, address=address, pid=process.pid)
    finally:
        process.stdin.close()  # it ends when nobody holds the other side
        process.wait(timeout=_ENDS_SOON_S)
        process.stdout.close()
        process.stderr.close()


def _tbf(link: str, megabit: float) -> tuple[str, ...]:
    """Of ``tc``: what shapes a link. A burst of some packets, a queue that drops nothing."""
    shape = ("tbf", "rate", f"{megabit:g}mbit", "burst", "64kb", "limit", "16mb")
    return ("qdisc", "replace", "dev", link, "root", *shape)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        inner = command[command.index("--") + 1 :]
        msg = f"`{' '.join(inner)}` says: {(done.stderr or done.stdout).strip()}"
        raise NoNamespacesError(msg)
