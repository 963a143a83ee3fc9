"""What a program may connect to: the host's loopback and unix sockets, metadata addresses, raw and netlink sockets."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from attackers import python

from sandmill.sandboxes import Sandbox


def test_there_is_no_network_but_its_own_loopback(box: Sandbox) -> None:
    script = """
import errno, socket
def attempt(family, address):
    s = socket.socket(family); s.settimeout(2)
    try: s.connect(address); print('connected', address)
    except OSError as e: print(errno.errorcode.get(e.errno, e))
attempt(socket.AF_INET, ('169.254.169.254', 80))
attempt(socket.AF_INET, ('1.1.1.1', 53))
attempt(socket.AF_INET6, ('2606:4700:4700::1111', 53))
s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()
attempt(socket.AF_INET, s.getsockname())
"""
    lines = python(box, script).splitlines()
    assert lines[:2] == ["ENETUNREACH", "ENETUNREACH"]
    assert lines[2] in ("ENETUNREACH", "EADDRNOTAVAIL")
    assert lines[3].startswith("connected")


def test_the_hosts_loopback_and_abstract_sockets_are_not_reachable(box: Sandbox) -> None:
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(("127.0.0.1", 0))
        server.listen()
        abstract.bind("\0sandmill-test")
        abstract.listen()
        script = f"""
import socket
for family, address in ((socket.AF_INET, {server.getsockname()!r}), (socket.AF_UNIX, '\\0sandmill-test')):
    try: socket.socket(family).connect(address); print('connected')
    except ConnectionRefusedError: print('refused')
"""
        assert python(box, script) == "refused\nrefused\n"


def test_a_unix_socket_of_the_host_below_usr_is_not_reachable(box: Sandbox) -> None:
    """A bind mount of the program folder would connect to it; an overlay does not."""
    path = f"/usr/share/sandmill-test-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(path)
            os.chmod(path, 0o777)
            server.listen()
            attempt = f"socket.socket(socket.AF_UNIX).connect({path!r}); print('connected')"
            script = f"import socket\ntry: {attempt}\nexcept OSError as e: print(e.errno)"
            assert int(python(box, script)) in (errno.ECONNREFUSED, errno.ENOENT)
        finally:
            Path(path).unlink(missing_ok=True)


def test_socket_families_beyond_local_and_internet_are_closed(box: Sandbox) -> None:
    script = """
import errno, socket
for family, kind, protocol in ((40, 1, 0), (17, 3, 0), (38, 5, 0), (2, 3, 1), (16, 3, 9), (31, 3, 0)):
    try: socket.socket(family, kind, protocol); print('made', family)
    except OSError as e: print(errno.errorcode[e.errno])
"""
    assert set(python(box, script, user="root").split()) <= {"EAFNOSUPPORT", "EPERM", "EPROTONOSUPPORT"}
