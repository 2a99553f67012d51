"""Where ranks of several machines meet: an address they all reach, a port, and the interface that leads there."""

import contextlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence

from polarlm.config import UserError

__all__ = [
    "check_port",
    "free_port",
    "interface_to",
    "is_loopback",
    "master_address",
    "own_address_towards",
    "own_addresses",
    "port_of_job",
]

# Above what systems reserve, and below the ports Linux gives to outgoing connections (32768 and up).
FIRST_PORT, PORTS = 15000, 15000
_ELSEWHERE = "192.0.2.1"  # a documentation address (RFC 5737): it leads over the default route; nothing is sent
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def port_of_job(job_id: str) -> int:
    """A port that every node of a job works out alike; jobs of neighbouring numbers have different ones."""
    numbers = [int(digits) for digits in re.findall(r"\d+", job_id.partition(".")[0])] or [sum(job_id.encode())]
    job, *element = numbers
    return FIRST_PORT + (job + 4099 * sum(element)) % PORTS  # the elements of an array lie far apart


def free_port(address: str = "", first: int = 0) -> int:
    """The first free port of this machine from `first` on, or any."""
    while True:
        with contextlib.suppress(OSError), socket.create_server((address, first)) as server:
            return server.getsockname()[1]
        assert first, "the system has no port left"
        first = FIRST_PORT + (first + 1 - FIRST_PORT) % PORTS


def check_port(environment: Mapping[str, str]) -> int | None:
    """The user's own MASTER_PORT, or None.

    Raises:
        UserError: it is no port.
    """
    port = environment.get("MASTER_PORT")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"MASTER_PORT={port!r} in the environment is not a port (1 to 65535): unset it, or mend it")
    return int(port) if port else None


def master_address(addresses: Sequence[str], is_here: bool) -> tuple[str, str]:
    """(where the ranks of several machines meet, why): the first host, under a name that is not this machine's alone.

    Many systems give their own name as 127.0.1.1; from elsewhere that is another machine. Then it is the address from
    which this machine reaches the second host.
    """
    first = addresses[0]
    if not is_here or not is_loopback(first):
        return first, "the first host"
    for other in addresses[1:]:
        own = _source_address(other)
        if own and not is_loopback(own):
            return own, f"this machine's address towards {other}, since {first} means loopback here"
    return first, "the first host; it means loopback here, and no way to the others was found: set MASTER_ADDR"


def own_address_towards(others: Sequence[str]) -> str:
    """The address under which these machines reach this one; its loopback address when it has no other."""
    towards = (_source_address(other) for other in (*others, _ELSEWHERE))
    known = [address for address in (*towards, *sorted(own_addresses())) if address]
    return next((address for address in known if not is_loopback(address)), "127.0.0.1")


def own_addresses() -> set[str]:
    """The IPv4 addresses of this machine."""
    return set(_interfaces())


def interface_to(address: str) -> str | None:
    """The network interface over which this machine and `address` talk, or None where the system does not say.

    On the machine of that address itself it is the one that has the address, or if that is loopback (the machine's own
    name often is), the one towards everywhere else.
    """
    own = _source_address(address)
    if own is None or is_loopback(own):
        own = _source_address(_ELSEWHERE)
    interfaces = _interfaces()
    if own in interfaces:
        return interfaces[own]
    return next((name for known, name in interfaces.items() if not is_loopback(known)), None)


def is_loopback(address: str) -> bool:
    """Whether a name or address means this machine to itself alone; a name nobody knows does not."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(address, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)


def _source_address(address: str) -> str | None:
    """The address this machine would send from; connecting a datagram socket sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]
    return None


def _interfaces() -> dict[str, str]:
    """Names of this machine's interfaces by their IPv4 addresses, on Linux."""
    if os.uname().sysname != "Linux":
        return {}
    import fcntl

    interfaces = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                interfaces[socket.inet_ntoa(answer[20:24])] = name
    return interfaces
