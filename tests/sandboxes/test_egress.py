"""Network egress by host name: what is allowed works through ordinary clients, and nothing else gets out, whatever is tried inside."""

from __future__ import annotations

import socket
import time

import pytest
import trustme
from internet import EVIL, FETCH, GOOD, OTHER, Boxes, Internet, blocked, fetch, http_server, raw, server_context, until

from sandmill.errors import ConfigError
from sandmill.sandboxes import Egress

ALLOW = Egress.allow("pypi.example.org", "*.files.example.org", "bücher.example.org")
TLS = """
import socket, ssl, sys
address, port, name, inner = sys.argv[1:]
context = ssl.create_default_context(cafile="ca.pem")
context.check_hostname = False
end = context.wrap_socket(socket.create_connection((address, int(port)), timeout=5), server_hostname=name or None)
end.sendall(f"GET /t HTTP/1.1\\r\\nHost: {inner}\\r\\n\\r\\n".encode())
print(end.recv(4096).decode().rpartition("\\r\\n")[2])
"""


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
    assert "ACCESS_DENIED" in try_tls("a.files.example.org", "")
    assert try_tls(EVIL, "pypi.example.org") == "good got pypi.example.org /t\n"
    assert evil.names == []
    assert set(good.names) == {"pypi.example.org"}
    assert blocked(box) == {
        ("evil.example.org", 443, "not on the list of allowed hosts"),
        (GOOD, 443, "a TLS client that names no server"),
        ("a.files.example.org", 443, "a TLS client that names no server"),
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
