"""Names of machines: compared by their first label, and asked for only when needed."""

import ipaddress
import socket

__all__ = ["short_host_name", "short_name"]


def short_name(host: str) -> str:
    """First label of a host name; an IP address stays whole. Two names are one machine when these are equal."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.partition(".")[0].lower()
    return host


def short_host_name() -> str:
    """First label of this machine's own name (not of `getfqdn()`, which many nodes answer with `localhost`)."""
    return short_name(socket.gethostname())
