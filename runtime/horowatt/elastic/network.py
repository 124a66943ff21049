# SPDX-License-Identifier: Apache-2.0
"""Which interface and address of this node the other hosts of a job can reach."""

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915
"""ioctl of Linux that returns the IPv4 address of an interface."""
_REQUEST_BYTES = 40
_ADDRESS_BYTES = slice(20, 24)
_DISCARD_PORT = 9
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"


def resolve(address: str) -> str | None:
    """Return the IPv4 address of a host name, or None when it has none."""
    try:
        return socket.gethostbyname(address)
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    """Return True when a host name or address leads back to the machine that asks."""
    resolved = resolve(address)
    return resolved is not None and ipaddress.ip_address(resolved).is_loopback


def interface_of(address: str) -> str | None:
    """Return the name of the local interface that owns ``address``, or None when none does."""
    resolved = resolve(address)
    if resolved is None:
        return None
    if ipaddress.ip_address(resolved).is_loopback:
        return LOOPBACK_INTERFACE
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[_ADDRESS_BYTES]) == resolved:
                return name
    return None


def address_towards(peer: str) -> str | None:
    """Return the local IPv4 address from which ``peer`` is reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, _DISCARD_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])
