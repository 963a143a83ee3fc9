"""Network egress by host name: what is allowed works through ordinary clients, and nothing else gets out, whatever is tried inside."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import trustme
from internet import EVIL, GOOD, OTHER, Internet, echo, http_server, internet, server_context, until

from sandmill.errors import ConfigError
from sandmill.sandboxes import Egress, Pool, Sandbox, SandboxSpec

Boxes = Callable[[Egress], Sandbox]
ALLOW = Egress.allow("pypi.example.org", "*.files.example.org", "bücher.example.org")
FETCH = """
import sys, urllib.error, urllib.request
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url, timeout=5).read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
    except Exception as error:
        print(type(error).__name__, error)
"""
RAW = """
import socket, sys
end = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)
end.sendall(sys.stdin.buffer.read())
end.settimeout(2)
try:
    while data := end.recv(65536):
        sys.stdout.buffer.write(data)
except OSError:
    pass
"""
TLS = """
import socket, ssl, sys
address, port, name, inner = sys.argv[1:]
context = ssl.create_default_context(cafile="ca.pem")
context.check_hostname = False
end = context.wrap_socket(socket.create_connection((address, int(port)), timeout=5), server_hostname=name or None)
end.sendall(f"GET /t HTTP/1.1\\r\\nHost: {inner}\\r\\n\\r\\n".encode())
print(end.recv(4096).decode().rpartition("\\r\\n")[2])
"""
LOOK_UP = """
import socket, sys
for name in sys.argv[1:]:
    try:
        print(sorted({entry[4][0] for entry in socket.getaddrinfo(name, 80)}))
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.fixture
def world() -> Iterator[Internet]:
    with internet() as world:
        world.names = {
            "pypi.example.org": [[GOOD]],
            "a.files.example.org": [[OTHER]],
            "b.c.files.example.org": [[OTHER]],
            "xn--bcher-kva.example.org": [[GOOD]],
            "evil.example.org": [[EVIL]],
        }
        yield world


@pytest.fixture
def boxes(world: Internet) -> Iterator[Boxes]:
    made: list[Sandbox] = []

    def make(network: Egress) -> Sandbox:
        made.append(Sandbox.from_spec(SandboxSpec.of(memory="256Mi", disk="32Mi", network=network), outside=world))
        return made[-1]

    yield make
    for box in made:
        box.terminate()


def fetch(box: Sandbox, *urls: str) -> list[str]:
    return box.run("python3", "-c", FETCH, *urls, timeout=20).stdout.decode().splitlines()


def raw(box: Sandbox, data: bytes, address: str = "198.18.0.1", port: int = 80) -> bytes:
    return box.run("python3", "-c", RAW, address, str(port), stdin=data, timeout=20).stdout


def blocked(box: Sandbox) -> set[tuple[str, int, str]]:
    return {(entry.host, entry.port, entry.reason) for entry in box.blocked}


def test_allowed_names_work_over_http(world: Internet, boxes: Boxes) -> None:
    http_server(world, GOOD, "good")
    http_server(world, OTHER, "other")
    box = boxes(ALLOW)
    urls = (
        "pypi.example.org/1",
        "PyPI.Example.ORG./2",
        "a.files.example.org/3",
        "b.c.files.example.org:80/4",
        "xn--bcher-kva.example.org/5",
    )
    assert fetch(box, *(f"http://{url}" for url in urls)) == [
        "good got pypi.example.org /1",
        "good got pypi.example.org. /2",
        "other got a.files.example.org /3",
        "other got b.c.files.example.org:80 /4",
        "good got xn--bcher-kva.example.org /5",
    ]
    assert box.blocked == ()


def test_names_beside_the_allowed_ones_do_not(world: Internet, boxes: Boxes) -> None:
    evil = http_server(world, EVIL, "evil")
    names = ("files.example.org", "example.org", "xpypi.example.org", "pypi.example.org.evil.org", "a.xfiles.example.org", "org", "x")
    for name in names:
        world.names[name] = [[EVIL]]
    box = boxes(ALLOW)
    answers = fetch(box, *(f"http://{name}/" for name in names))
    assert all("Name or service not known" in answer or "not known" in answer for answer in answers), answers
    assert {host for host, port, _ in blocked(box) if port == 53} >= set(names[:5])
    assert (evil.heard, world.lookups, world.connections) == ([], [], [])


def test_tls_is_let_through_by_its_server_name_and_stays_end_to_end(world: Internet, boxes: Boxes) -> None:
    authority = trustme.CA()
    server = http_server(world, GOOD, "good", 443, server_context(authority, "pypi.example.org"))
    box = boxes(ALLOW)
    box.write("ca.pem", authority.cert_pem.bytes())
    script = FETCH.replace("timeout=5", "timeout=5, context=__import__('ssl').create_default_context(cafile='ca.pem')")
    done = box.run("python3", "-c", script, "https://pypi.example.org/simple", "https://evil.example.org/", timeout=20)
    good, evil = done.stdout.decode().splitlines()
    assert good == "good got pypi.example.org /simple"
    assert "not known" in evil
    assert server.names == ["pypi.example.org"]


def test_the_dialled_address_counts_for_nothing(world: Internet, boxes: Boxes) -> None:
    """An allowed host's own address with another server name gets nowhere; another address with an allowed name leads to that host."""
    authority = trustme.CA()
    good = http_server(world, GOOD, "good", 443, server_context(authority, "pypi.example.org"))
    evil = http_server(world, EVIL, "evil", 443, server_context(authority, "evil.example.org"))
    box = boxes(ALLOW)
    box.write("ca.pem", authority.cert_pem.bytes())

    def try_tls(address: str, name: str) -> str:
        done = box.run("python3", "-c", TLS, address, "443", name, name or "x", timeout=20)
        return done.stdout.decode() + done.stderr.decode()

    assert "TLSV1_ALERT_ACCESS_DENIED" in try_tls(GOOD, "evil.example.org")
    assert "TLSV1_ALERT_ACCESS_DENIED" in try_tls(GOOD, "")
    assert "ACCESS_DENIED" in try_tls("2606:2800:220:1::1", "evil.example.org")
    assert try_tls(EVIL, "pypi.example.org") == "good got pypi.example.org /t\n"
    assert evil.names == []
    assert set(good.names) == {"pypi.example.org"}
    assert blocked(box) == {
        ("evil.example.org", 443, "not on the list of allowed hosts"),
        (GOOD, 443, "a TLS client that names no server"),
    }


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: evil.example.org\r\n\r\n", "not on the list of allowed hosts"),
        (b"GET / HTTP/1.1\r\n\r\n", "an HTTP request without a host"),
        (b"GET / HTTP/1.0\r\n\r\n", "an HTTP request without a host"),
        (b"GET / HTTP/1.1\r\nHost: pypi.example.org\r\nHost: evil.example.org\r\n\r\n", "an HTTP request with several host headers"),
        (b"GET http://evil.example.org/ HTTP/1.1\r\nHost: pypi.example.org\r\n\r\n", "an HTTP request for two hosts"),
        (b"GET http://pypi.example.org/ HTTP/1.1\r\nHost: evil.example.org\r\n\r\n", "an HTTP request for two hosts"),
        (b"CONNECT evil.example.org:443 HTTP/1.1\r\nHost: pypi.example.org\r\n\r\n", "the method CONNECT"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2 without TLS"),
        (b"GET / HTTP/1.1\r\nHost: pypi.example.org:8080\r\n\r\n", "an HTTP request for another port"),
        (b"GET / HTTP/1.1\r\nHost: pypi.example.org@evil.example.org\r\n\r\n", "not a host name"),
        (b"GET / HTTP/1.1\nHost: pypi.example.org\n\n\r\n\r\n", "not an HTTP/1 request"),
        (b"GET / HTTP/1.1\r\nHost: pypi.example.org\r\n X: y\r\n\r\n", "a malformed HTTP header"),
        (b"GET / HTTP/1.1\r\nHost : pypi.example.org\r\n\r\n", "a malformed HTTP header"),
        (
            b"POST / HTTP/1.1\r\nHost: pypi.example.org\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "an HTTP request whose end is unclear",
        ),
        (b"POST / HTTP/1.1\r\nHost: pypi.example.org\r\nTransfer-Encoding: xchunked\r\n\r\n", "an HTTP request whose end is unclear"),
        (b"POST / HTTP/1.1\r\nHost: pypi.example.org\r\nContent-Length: +4\r\n\r\nabcd", "an HTTP request whose end is unclear"),
        (b"GET /" + b"a" * 40000, "an HTTP request that is too long"),
        (b"SSH-2.0-x\r\n\r\n", "not an HTTP/1 request"),
    ],
)
def test_an_http_request_for_nobody_or_two_is_refused(data: bytes, reason: str, world: Internet, boxes: Boxes) -> None:
    box = boxes(ALLOW)
    answer = raw(box, data)
    assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert reason.encode() in answer
    assert [entry.reason for entry in box.blocked] == [reason]
    assert world.connections == []


def test_every_request_of_a_kept_connection_is_checked(world: Internet, boxes: Boxes) -> None:
    good = http_server(world, GOOD, "good")
    box = boxes(ALLOW)
    requests = b"POST /%b HTTP/1.1\r\nHost: %b\r\nContent-Length: 3\r\n\r\nabc"
    first = requests % (b"1", b"pypi.example.org") + requests % (b"2", b"pypi.example.org")
    answer = raw(box, first + requests % (b"3", b"evil.example.org") + requests % (b"4", b"pypi.example.org"))
    assert b"/3" not in answer
    assert until(lambda: len(good.heard) == 2)
    assert all(head.startswith(b"POST /%d " % number) and head.endswith(b"|abc") for number, head in enumerate(good.heard, 1))
    assert blocked(box) == {("evil.example.org", 80, "not on the list of allowed hosts")}
    raw(box, requests % (b"5", b"pypi.example.org") + requests % (b"6", b"a.files.example.org"))
    assert ("a.files.example.org", 80, "on a connection to pypi.example.org") in blocked(box)
    assert not any(b"a.files" in head for head in good.heard)


def test_a_request_hidden_in_a_body_stays_a_body(world: Internet, boxes: Boxes) -> None:
    heard = bytearray()

    def listen(connection: socket.socket) -> None:
        while data := connection.recv(65536):
            heard.extend(data)

    world.serve(GOOD, 80, listen)
    box = boxes(ALLOW)
    inner = b"GET /hidden HTTP/1.1\r\nHost: evil.example.org\r\n\r\n"
    chunk = b"%X;ext=1\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(inner), inner)
    raw(
        box,
        b"POST / HTTP/1.1\r\nHost: pypi.example.org\r\nTransfer-Encoding: chunked\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n" + chunk,
    )
    assert until(lambda: heard.endswith(b"0\r\n\r\n"))
    head, _, body = bytes(heard).partition(b"\r\n\r\n")
    assert head == b"POST / HTTP/1.1\r\nHost: pypi.example.org\r\nTransfer-Encoding: chunked"
    assert body == b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)


def test_a_redirect_to_a_forbidden_host_ends_there(world: Internet, boxes: Boxes) -> None:
    http_server(world, GOOD, "good")
    evil = http_server(world, EVIL, "evil")
    box = boxes(ALLOW)
    answers = fetch(
        box, "http://pypi.example.org/to/evil.example.org", f"http://pypi.example.org/to/{EVIL}", "http://pypi.example.org/to/127.0.0.1"
    )
    assert "not known" in answers[0]
    assert [answer[:3] for answer in answers[1:] if answer] == ["403", "403"]
    assert evil.heard == []
    assert {host for host, _, _ in blocked(box)} == {"evil.example.org", EVIL, "127.0.0.1"}


QUERY = """
import socket, struct, sys
def ask(name, kind):
    labels = b"".join(bytes([len(label)]) + label for label in name.split(b".")) + b"\\0"
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.settimeout(2)
    end.connect((sys.argv[1], 53))
    end.send(struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + labels + struct.pack("!2H", kind, 1))
    try:
        answer = end.recv(4096)
    except OSError as error:
        return type(error).__name__
    return answer[3] & 15, struct.unpack_from("!H", answer, 6)[0], len(answer) - 12 - len(labels) - 4
"""


def test_dns_carries_nothing_in_or_out(world: Internet, boxes: Boxes) -> None:
    """TXT, NULL, ANY and others, on allowed names and below an allowed wildcard: empty answers, and nobody outside hears of them."""
    box = boxes(ALLOW)
    script = (
        QUERY
        + """
for kind in (16, 10, 255, 15, 33, 65, 5, 2, 12, 28):
    for name in (b"pypi.example.org", b"secret" * 10 + b".files.example.org"):
        assert ask(name, kind) == (0, 0, 0), (kind, name, ask(name, kind))
assert ask(b"pypi.example.org", 1) == (0, 1, 16)
assert ask(b"a" * 63 + b"." + b"b" * 63 + b"." + b"c" * 63 + b".files.example.org", 1) == (0, 1, 16)
assert ask(b".".join([b"a" * 63] * 4) + b".files.example.org", 1) == (3, 0, 0)
assert ask(b"evil.example.org", 16) == (3, 0, 0)
assert ask(b"\\xff\\n\\x1b[31m.example.org", 1) == (3, 0, 0)
assert ask(b"a\\0b.files.example.org", 1) == (3, 0, 0)
print("done")
"""
    )
    for server in ("127.0.0.1", "8.8.8.8"):
        assert box.run("python3", "-c", script, server, timeout=30).stderr == b""
    assert (world.lookups, world.connections) == ([], [])
    assert all(entry.host.isprintable() for entry in box.blocked)


def test_a_thousand_queries_are_paced_and_remembered_in_bounds(world: Internet, boxes: Boxes) -> None:
    box = boxes(ALLOW)
    script = QUERY + 'print([ask(b"x%d.evil.org" % number, 1) for number in range(1000)].count((3, 0, 0)))'
    started = time.monotonic()
    assert box.run("python3", "-c", script, "127.0.0.1", timeout=60).stdout == b"1000\n"
    assert time.monotonic() - started > 5
    assert len(box.blocked) == 256
    assert world.lookups == []


def test_dns_over_tcp(world: Internet, boxes: Boxes) -> None:
    script = """
import socket, struct
end = socket.create_connection(("8.8.8.8", 53), timeout=5)
for name, expected in ((b"pypi", 0), (b"nope", 3)):
    query = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + bytes([4]) + name + b"\\7example\\3org\\0" + struct.pack("!2H", 1, 1)
    end.sendall(struct.pack("!H", len(query)) + query)
    answer = end.recv(4096)
    assert answer[5] & 15 == expected, answer
end.sendall(b"\\xff\\xff")
assert end.recv(10) == b""
"""
    for network in (ALLOW, Egress.open()):
        assert boxes(network).run("python3", "-c", script, timeout=20).stderr == b""
    assert set(world.lookups) == {"pypi.example.org", "nope.example.org"}


PROTOCOLS = """
import socket
def tries(family, kind, protocol, address=None):
    try:
        end = socket.socket(family, kind, protocol)
        if address:
            end.settimeout(1)
            end.connect(address)
            end.send(b"x" * 100)
            end.recv(100)
        return "got through"
    except OSError as error:
        return error.strerror or type(error).__name__
i4, i6, dgram, raw, stream = socket.AF_INET, socket.AF_INET6, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_STREAM
for port in (1, 123, 443, 8080, 65535):
    print("udp", tries(i4, dgram, 0, ("93.184.216.34", port)), tries(i6, dgram, 0, ("2606:2800::1", port)), sep="|")
print("tcp", tries(i4, stream, 0, ("93.184.216.34", 22)), tries(i6, stream, 0, ("2606:2800::1", 8443)), sep="|")
print("icmp", tries(i4, dgram, 1), tries(i6, dgram, 58), sep="|")
print("raw", tries(i4, raw, 1), tries(i6, raw, 255), sep="|")
print("packet", tries(17, raw, 0x300), tries(17, dgram, 0x800), sep="|")
print("sctp", tries(i4, stream, 132), tries(i4, socket.SOCK_SEQPACKET, 132), sep="|")
print("netfilter", tries(16, raw, 12), tries(16, raw, 4), sep="|")
"""


@pytest.mark.parametrize("network", [ALLOW, Egress.open()], ids=["allow", "open"])
def test_no_second_protocol(network: Egress, world: Internet, boxes: Boxes) -> None:
    box = boxes(network)
    for user in ("user", "root"):
        lines = [line.split("|") for line in box.run("python3", "-c", PROTOCOLS, user=user, timeout=60).stdout.decode().splitlines()]
        assert [line[0] for line in lines] == ["udp"] * 5 + ["tcp", "icmp", "raw", "packet", "sctp", "netfilter"]
        for name, *results in lines:
            assert "got through" not in results, (user, name, results)
            if name == "udp" or (name == "tcp" and network is ALLOW):
                assert results == ["Connection refused"] * 2, (user, name, results)
    assert world.connections == ([] if network is ALLOW else [(GOOD, 22), ("2606:2800::1", 8443)] * 2)


def test_the_network_cannot_be_rebuilt_from_inside(boxes: Boxes) -> None:
    """In-sandbox root may not change routes, rules, addresses, or take over a listening port."""
    script = """
import fcntl, socket, struct
for kind in (24, 25, 20, 16):
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    netlink.send(struct.pack("=IHHII", 28, kind, 5, 1, 0) + struct.pack("=8BI", 2, 0, 0, 0, 255, 4, 254, 2, 0))
    print(-struct.unpack_from("=i", netlink.recv(4096), 16)[0])
for port, kind in ((53, socket.SOCK_DGRAM), (80, socket.SOCK_STREAM), (443, socket.SOCK_STREAM), (53, socket.SOCK_STREAM)):
    for address in ("0.0.0.0", "198.18.0.1"):
        end = socket.socket(socket.AF_INET, kind)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            end.bind((address, port))
            print("bound", port)
        except OSError as error:
            print(error.errno)
"""
    for user in ("user", "root"):
        done = boxes(ALLOW).run("python3", "-c", script, user=user, timeout=20)
        assert done.stderr == b""
        assert set(done.stdout.split()) <= {b"1", b"13", b"98"}, done.stdout


def test_a_name_that_changes_its_mind_leads_nowhere(world: Internet, boxes: Boxes) -> None:
    """DNS rebinding, and names that always pointed inside: the addresses that are connected to are the ones that were checked."""
    good = http_server(world, GOOD, "good")
    inside = http_server(world, "127.0.0.1", "inside")
    world.servers[("10.0.0.1", 80)] = world.servers[("169.254.169.254", 80)] = inside.port
    world.names["pypi.example.org"] = [
        [GOOD],
        ["127.0.0.1"],
        ["169.254.169.254"],
        ["10.0.0.1", GOOD],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
    ]
    box = boxes(ALLOW)
    answers = [fetch(box, "http://pypi.example.org/")[0] for _ in range(6)]
    assert [answer[:8] for answer in answers] == ["good got", "403 sand", "403 sand", "good got", "403 sand", "403 sand"]
    assert inside.heard == []
    assert len(good.heard) == 2
    assert {address for address, _ in world.connections} == {GOOD}
    assert [entry.reason for entry in box.blocked] == [
        "127.0.0.1 is this machine's loopback",
        "169.254.169.254 is a cloud metadata address",
        "64:ff9b::7f00:1 stands for an IPv4 address: 127.0.0.1 is this machine's loopback",
    ]


def test_open_reaches_every_public_port_by_both_families(world: Internet, boxes: Boxes) -> None:
    world.serve(GOOD, 22, echo)
    world.serve("2606:2800:220:1::1", 8443, echo)
    http_server(world, GOOD, "good")
    box = boxes(Egress.open())
    assert raw(box, b"ssh", GOOD, 22) == b"ssh"
    assert raw(box, b"v6", "2606:2800:220:1::1", 8443) == b"v6"
    assert fetch(box, "http://pypi.example.org/", f"http://{GOOD}/x") == ["good got pypi.example.org /", f"good got {GOOD} /x"]
    assert box.run("python3", "-c", LOOK_UP, "pypi.example.org", "nowhere.org").stdout.decode().split("\n")[:2] == [
        f"['{GOOD}']",
        "gaierror",
    ]
    assert box.blocked == ()


INSIDE = {
    "loopback": "127.0.0.2",
    "loopback through IPv6": "::ffff:127.0.0.2",
    "this network": "0.1.2.3",
    "private": "10.1.2.3",
    "private, 172.16": "172.31.255.255",
    "private, 192.168": "192.168.1.1",
    "carrier": "100.64.0.1",
    "link-local": "169.254.1.1",
    "metadata": "169.254.169.254",
    "metadata of Azure": "168.63.129.16",
    "metadata of Alibaba": "100.100.100.200",
    "multicast": "224.0.0.1",
    "broadcast": "255.255.255.255",
    "unique local": "fd12::1",
    "metadata through IPv6": "fd00:ec2::254",
    "metadata through NAT64": "64:ff9b::a9fe:a9fe",
    "private through 6to4": "2002:0a00:0001::1",
    "Teredo": "2001:0:1234::1",
    "site-local": "fec0::1",
    "IPv4-compatible": "::10.0.0.1",
}


def test_open_reaches_nothing_inside(world: Internet, boxes: Boxes) -> None:
    box = boxes(Egress.open())
    script = """
import socket, sys
for address in sys.argv[1:]:
    try:
        end = socket.create_connection((address, 8080), timeout=3)
        end.sendall(b"x")
        print("through" if end.recv(10) else "closed")
    except OSError as error:
        print(type(error).__name__)
"""
    done = box.run("python3", "-c", script, *INSIDE.values(), timeout=60)
    results = dict(zip(INSIDE, done.stdout.decode().split(), strict=True))
    assert set(results.values()) <= {"ConnectionResetError", "ConnectionRefusedError", "OSError", "PermissionError", "closed"}, results
    assert world.connections == []
    assert len(box.blocked) >= 14
    assert all(entry.port == 8080 for entry in box.blocked)


def test_open_answers_no_name_with_an_address_inside(world: Internet, boxes: Boxes) -> None:
    inside = {f"n{number}.example.org": [[address]] for number, address in enumerate(("10.0.0.1", "169.254.169.254", "::1", "fd00::1"))}
    world.names |= inside | {"mixed.example.org": [["192.168.0.1", GOOD]], "metadata.google.internal": [[GOOD]]}
    box = boxes(Egress.open())
    names = (
        box.run("python3", "-c", LOOK_UP, *inside, "metadata.google.internal", "mixed.example.org", timeout=20).stdout.decode().split("\n")
    )
    assert names[:-1] == ["gaierror"] * 5 + [f"['{GOOD}']"]
    assert {host for host, _, _ in blocked(box)} == {*inside, "metadata.google.internal"}


@pytest.mark.parametrize("network", [ALLOW, Egress.open()], ids=["allow", "open"])
def test_services_of_the_host_and_of_other_sandboxes_are_out_of_reach(network: Egress, world: Internet, boxes: Boxes) -> None:
    seen = []
    with socket.create_server(("0.0.0.0", 0)) as host:
        threading.Thread(target=lambda: seen.append(host.accept()), daemon=True).start()
        port = host.getsockname()[1]
        one, two = boxes(network), boxes(network)
        serve = one.exec(
            "python3",
            "-c",
            f"import socket; s=socket.create_server(('0.0.0.0', {port})); print(1, flush=True); s.accept(); print('taken', flush=True)",
        )
        assert next(iter(serve.stdout)) == "1\n"
        own = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} | {"127.0.0.1", "192.0.2.2"}
        for address in own:
            assert raw(two, b"knock", str(address), port) == b""
        assert (seen, world.connections) == ([], [])
        assert one.run("python3", "-c", RAW, "127.0.0.1", str(port), timeout=10, stdin=b"").exit_code == 0
        assert serve.stdout.read() == "taken\n"
        with socket.create_connection(("127.0.0.1", port)):
            assert until(lambda: len(seen) == 1)
    seen[0][0].close()


def test_its_end_ends_its_connections_and_its_namespace(world: Internet, boxes: Boxes) -> None:
    server = world.serve(GOOD, 22, echo)
    before = set(os.listdir("/proc/self/fd"))
    box = boxes(Egress.open())
    talk = box.exec(
        "python3",
        "-c",
        f"import socket,time; s=socket.create_connection(('{GOOD}',22)); s.send(b'x'); s.recv(1); print(1,flush=True); time.sleep(60)",
    )
    assert next(iter(talk.stdout)) == "1\n"
    assert server.open_connections == 1
    first = box.run("readlink", "/proc/self/ns/net").stdout
    box.terminate()
    assert until(lambda: server.open_connections == 0)
    assert until(lambda: len(set(os.listdir("/proc/self/fd")) - before) <= 2)  # the egress loop's own
    with Sandbox.create(memory="128Mi", disk="16Mi") as plain:
        assert plain.run("readlink", "/proc/self/ns/net").stdout != first
        assert b"unreachable" in plain.run("python3", "-c", f"import socket; socket.create_connection(('{GOOD}', 22))").stderr


def test_a_client_that_does_not_read_stops_the_server(world: Internet, boxes: Boxes) -> None:
    sent = 0

    def pour(connection: socket.socket) -> None:
        nonlocal sent
        while True:
            sent += connection.send(bytes(1 << 16))

    world.serve(GOOD, 22, pour)
    box = boxes(Egress.open())
    box.exec("python3", "-c", f"import socket,time; s=socket.create_connection(('{GOOD}',22)); s.recv(1); time.sleep(60)")
    assert until(lambda: sent > 0)
    seen = [-1]
    assert until(lambda: seen[-1] == sent or bool(seen.append(sent) or time.sleep(0.5)), 20)
    assert sent < 64 << 20


def test_connections_beyond_the_limit_wait(world: Internet, boxes: Boxes) -> None:
    server = world.serve(GOOD, 22, echo)
    box = boxes(Egress.open())
    script = f"""
import socket
ends = []
for number in range(140):
    ends.append(socket.create_connection(('{GOOD}', 22), timeout=5))
    ends[-1].sendall(b"x")
print(sum(1 for end in ends[:128] if end.recv(1) == b"x"), flush=True)
ends[139].settimeout(1)
try:
    ends[139].recv(1)
except TimeoutError:
    print("waits", flush=True)
for end in ends[:64]:
    end.close()
ends[139].settimeout(10)
print(ends[139].recv(1).decode())
"""
    done = box.run("python3", "-c", script, timeout=60)
    assert done.stdout == b"128\nwaits\nx\n", done.stderr
    assert server.open_connections <= 128


def test_a_pool_keeps_sandboxes_with_a_network(world: Internet) -> None:
    with Pool(SandboxSpec.of(memory="128Mi", disk="16Mi", network=Egress.allow("pypi.example.org")), 1) as pool:
        with pool.take() as box:
            assert box.run("python3", "-c", LOOK_UP, "pypi.example.org", "evil.org").stdout == b"['198.18.0.1']\ngaierror\n"


@pytest.mark.parametrize(
    ("hosts", "presets", "says"),
    [
        ((), (), "allows no host"),
        (("*",), (), "Egress.open"),
        (("https://pypi.org/simple",), (), 'write "pypi.org"'),
        (("pypi.org:443",), (), 'write "pypi.org"'),
        (("10.0.0.1",), (), "is an address"),
        (("[::1]",), (), "is an address"),
        (("*.org",), (), "is not a host name"),
        (("a.*.org",), (), "is not a host name"),
        (("localhost",), (), "is not a host name"),
        (("a..b",), (), "is not a host name"),
        (("-a.org",), (), "is not a host name"),
        (("faß.de",), (), "IDNA"),
        (("x" * 300 + ".org",), (), "is not a host name"),
        (("a.org\n",), (), "is not a host name"),
        ((), ("pypy",), "did you mean 'pypi'"),
        (tuple(f"h{number}.org" for number in range(300)), (), "at most 256"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(hosts: tuple[str, ...], presets: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        Egress.allow(*hosts, presets=presets)
