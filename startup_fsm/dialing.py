"""
Opening a connection between two ranks: who listens where, and how either side knows that it speaks with the other.

    caller     startup-fsm <key of the called> <rank of the caller>
    called     startup-fsm <rank of the called>

The key is in the store, so that nobody else is taken for a rank. Plain sockets; nothing here knows what is said later.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Mapping
from typing import Any, Final

import attrs

_CONNECTING_S: Final = 3.0
#: The other side answers from a thread that may have to wait for its interpreter.
_ANSWERING_S: Final = 15.0
# A lost host: first probe after 10 s, then every 5 s, given up at 30 s.
_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000))
_GREETING: Final = "startup-fsm"
_LONGEST_GREETING: Final = 4_096


@attrs.define(eq=False)
class Link:
    """
    One connection.

    Attributes:
        socket: Not blocking.
        rank: Of the other side; None until it has said who it is.
        held, unsent: Bytes of a line that is not whole yet, and what could not be sent yet.
        state, trouble: What the other side said last of where it is.
        is_done: Whether it said goodbye.
    """

    socket: socket.socket
    rank: int | None = None
    held: bytearray = attrs.field(factory=bytearray)
    unsent: bytearray = attrs.field(factory=bytearray)
    state: str | None = None
    trouble: str | None = None
    is_done: bool = False


def host_names(towards: str) -> tuple[str, ...]:
    """Addresses and names at which another host may find this one: the way to the store first."""
    found = []
    try:
        kind, _, _, _, address = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as way:
            # Nothing is sent: this only asks which of our addresses would be used.
            way.connect(address)
            found.append(str(way.getsockname()[0]))
    except OSError:
        pass
    # A name may lead back to the host itself only; then it is of no use elsewhere, and harms nobody.
    return tuple(dict.fromkeys([*found, socket.gethostname()]))


def listener() -> socket.socket:
    """A socket that listens on every address of this host, at a port that the kernel chose."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
    return socket.create_server(("", 0), backlog=64)


def dial(rank: int, address: Mapping[str, Any], *, caller: int, is_near: bool) -> tuple[Link | None, bool]:
    """
    Call a rank at its address.

    Gives the connection, or None and whether nobody lives there any more: every host that was tried refused.
    """
    is_gone = True
    for host in [*(["127.0.0.1"] if is_near else []), *address.get("hosts", ())]:
        try:
            opened = socket.create_connection((host, int(address["port"])), timeout=_CONNECTING_S)
        except ConnectionRefusedError:
            continue
        except (OSError, ValueError, KeyError):
            is_gone = False
            continue
        try:
            opened.settimeout(_ANSWERING_S)
            opened.sendall(f"{_GREETING} {address['key']} {caller}\n".encode())
            if _first_line(opened) == f"{_GREETING} {rank}":
                return Link(opened, rank), False
        except TimeoutError:
            is_gone = False
        except (OSError, KeyError):
            pass
        # Somebody else lives there, or it died meanwhile.
        opened.close()
    return None, is_gone


def caller_of(line: bytes, key: str) -> int | None:
    """The rank that a greeting is from; None where it is none, or has not our key."""
    words = line.decode("ascii", "replace").split()
    if len(words) != 3 or words[0] != _GREETING or not hmac.compare_digest(words[1].encode(), key.encode()):
        return None
    return int(words[2]) if words[2].isdecimal() else None


def may_be_greeting(held: bytearray) -> bool:
    """Whether a greeting may begin with these bytes."""
    wanted = f"{_GREETING} ".encode()
    return held[: len(wanted)] == wanted[: len(held)] and len(held) <= _LONGEST_GREETING


def answer(link: Link, rank: int) -> None:
    """Tell a caller that it has reached us."""
    with contextlib.suppress(OSError):
        link.socket.send(f"{_GREETING} {rank}\n".encode())


def keep_alive(opened: socket.socket) -> None:
    """Have the kernel look after a connection that says nothing, and send what is said at once."""
    with contextlib.suppress(OSError):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        with contextlib.suppress(OSError, AttributeError):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _first_line(opened: socket.socket) -> str:
    """The first line that the other side says, byte by byte, so that nothing after it is lost."""
    line = bytearray()
    while len(line) < 128 and (byte := opened.recv(1)) and byte != b"\n":
        line += byte
    return line.decode("ascii", "replace")
