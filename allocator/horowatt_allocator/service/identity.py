# SPDX-License-Identifier: Apache-2.0
"""Who calls: the kernel says so, by the Unix socket's peer credentials."""

import pwd
import socket
import struct
from dataclasses import dataclass

from horowatt_allocator.adapters.config import ServiceConfig

_UCRED = struct.Struct("3i")
"""``struct ucred`` of Linux: pid, uid, gid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCred:
    """Process, user and group at the other end of a Unix socket."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A person or agent that calls the service.

    Attributes:
        username: Name of the Unix user; None when the user data base does not know the uid.
        operator: May see and touch every job.
        agent: May report for a node.
    """

    uid: int
    gid: int
    username: str | None
    operator: bool
    agent: bool

    @property
    def shown_name(self) -> str:
        """The name, or the uid where there is none."""
        return self.username or f"uid {self.uid}"


def peer_of(connection: socket.socket) -> PeerCred:
    """Return who is at the other end of a connected Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    # The kernel's ids are unsigned; 4294967294 is a user, -2 is none.
    return PeerCred(pid=pid, uid=uid & 0xFFFFFFFF, gid=gid & 0xFFFFFFFF)


class Registry:
    """Turns credentials into callers, by the configuration and the system's user data base."""

    def __init__(self, config: ServiceConfig, service_uid: int) -> None:
        self._operators = frozenset(config.operators)
        self._agent_users = frozenset(config.agent_users)
        self._trusted_uids = frozenset({0, service_uid})

    def caller(self, peer: PeerCred) -> Caller:
        """Return the caller behind credentials."""
        try:
            username: str | None = pwd.getpwuid(peer.uid).pw_name
        except KeyError:
            username = None
        trusted = peer.uid in self._trusted_uids
        return Caller(
            uid=peer.uid,
            gid=peer.gid,
            username=username,
            operator=trusted or username in self._operators,
            agent=trusted or username in self._agent_users,
        )
