"""What egress reads of hostile bytes: each reader gives its one answer or its one refusal, whatever it is fed."""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmill.config.hosts import PRESETS, host_name, parse_host
from sandmill.errors import ConfigError
from sandmill.sandboxes.egress import addresses, dns, http, tls
from sandmill.sandboxes.egress.blocked import MOST_ENTRIES, BlockedLog, Refused
from sandmill.sandboxes.egress.policy import Policy
from sandmill.sandboxes.egress.resolver import StandIns
from sandmill.sandboxes.spec import Egress


def hello(name: str | None, *, records: int = 1) -> bytes:
    """A real client's first bytes, cut into several records."""
    context = ssl.create_default_context()
    context.check_hostname = False
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(into, out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    body = out.read()[5:]
    size = -(-len(body) // records)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack("!H", len(piece)) + piece for piece in pieces)


@pytest.mark.parametrize("records", [1, 2, 5])
def test_a_server_name_is_found_as_soon_as_the_greeting_is_complete(records: int) -> None:
    data = hello("pypi.example.org", records=records)
    assert tls.server_name(data) == "pypi.example.org"
    assert tls.server_name(data + b"early data") == "pypi.example.org"
    assert [tls.server_name(data[:cut]) for cut in range(0, len(data), 7)] == [None] * len(range(0, len(data), 7))


def extension(kind: int, content: bytes) -> bytes:
    return struct.pack("!2H", kind, len(content)) + content


def greeting(*extensions: bytes) -> bytes:
    joined = b"".join(extensions)
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\2\x13\x01" + b"\1\0" + struct.pack("!H", len(joined)) + joined
    message = b"\1" + len(body).to_bytes(3) + body
    return b"\x16\x03\x01" + struct.pack("!H", len(message)) + message


def names(*hosts: bytes, kind: int = 0) -> bytes:
    entries = b"".join(bytes((kind,)) + struct.pack("!H", len(host)) + host for host in hosts)
    return extension(0, struct.pack("!H", len(entries)) + entries)


ECH, ESNI = extension(0xFE0D, bytes(200)), extension(0xFFCE, bytes(200))


def test_an_encrypted_name_is_none_and_the_open_one_beside_it_counts() -> None:
    assert tls.server_name(greeting(names(b"outer.org"), ECH)) == "outer.org"
    for extensions in ((ECH,), (ESNI,), (), (names(b"a.org", kind=1),), (names(),)):
        with pytest.raises(tls.NoServerNameError, match="names no server"):
            tls.server_name(greeting(*extensions))


def test_two_names_are_none() -> None:
    for extensions in ((names(b"a.org", b"b.org"),), (names(b"a.org"), names(b"b.org"))):
        with pytest.raises(tls.NoServerNameError, match="several"):
            tls.server_name(greeting(*extensions))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x80\x2e\x01\x03\x01",
        b"\x16\x02\x00\x00\x05",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
    ],
)
def test_what_is_no_greeting_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(tls.NoServerNameError):
        tls.server_name(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_greeting_has_a_name_or_none_or_is_refused(data: st.DataObject) -> None:
    good = bytearray(greeting(names(b"pypi.example.org"), ECH))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(tls.NoServerNameError):
        assert isinstance(tls.server_name(bytes(good)), str | None)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600))
def test_any_datagram_is_a_query_or_none(data: bytes) -> None:
    try:
        query = dns.parse(b"\0\1\1\0\0\1\0\0\0\0\0\0" + data)
    except dns.MalformedQueryError:
        return
    answer = dns.answer(query, dns.NO_SUCH_NAME)
    assert answer[12:] == query.question
    assert query.question in data


def test_an_answer_holds_only_addresses_of_the_kind_asked_for() -> None:
    both = [ipaddress.ip_address("93.184.216.34"), ipaddress.ip_address("2606:2800::1")]
    for kind, packed in ((dns.A, both[0].packed), (dns.AAAA, both[1].packed)):
        query = dns.parse(b"\0\7\1\0\0\1\0\0\0\0\0\0\1a\3ORG\0" + struct.pack("!2H", kind, 1))
        assert query.name == "a.org"
        answer = dns.answer(query, dns.NO_ERROR, both)
        assert answer[:12] == b"\0\7\x81\x80\0\1\0\1\0\0\0\0"
        assert answer.endswith(struct.pack("!H", len(packed)) + packed)


@pytest.mark.parametrize(
    "data",
    [
        b"\0\7\x81\0\0\1\0\0\0\0\0\0\1a\3org\0\0\1\0\1",  # an answer
        b"\0\7\x28\0\0\1\0\0\0\0\0\0\1a\3org\0\0\1\0\1",  # an update
        b"\0\7\1\0\0\2\0\0\0\0\0\0\1a\3org\0\0\1\0\1\1a\3org\0\0\1\0\1",  # two questions
        b"\0\7\1\0\0\1\0\0\0\0\0\0\xc0\x0c\0\1\0\1",  # a pointer to itself
        b"\0\7\1\0\0\1\0\0\0\0\0\0\3a.b\3org\0\0\1\0\1",  # a dot inside a label
        b"\0\7\1\0\0\1\0\0\0\0\0\0\1a\3org\0\0\1\0\3",  # another class
        b"\0\7\1\0\0\1\0\0\0\0\0\0\1a\3org",
    ],
)
def test_odd_queries_are_none(data: bytes) -> None:
    with pytest.raises(dns.MalformedQueryError):
        dns.parse(data)


def test_a_request_is_sent_on_without_what_concerns_only_the_first_hop() -> None:
    head = (
        b"GET http://A.org:80/x?y HTTP/1.1\r\nHost: a.org\r\nProxy-Authorization: secret\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nX: \r\n\r\n"
    )
    assert http.parse(head) == http.Request("a.org", b"GET /x?y HTTP/1.1\r\nHost: a.org\r\nX: \r\n\r\n", 0)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"\r\n",
                b"\n",
                b"\r",
                b" ",
                b"\t",
                b":",
                b"\0",
                b"Host: a.org",
                b"Content-Length: 3",
                b"Transfer-Encoding: chunked",
                b"X",
                b"GET / HTTP/1.1",
                b"http://b.org/",
            ]
        ),
        max_size=14,
    )
)
def test_whatever_is_accepted_reads_the_same_to_anyone(pieces: list[bytes]) -> None:
    """No bare line end, one host, one length: what goes on to the server has nothing that two readers split differently."""
    try:
        request = http.parse(b"GET / HTTP/1.1\r\n" + b"".join(pieces) + b"\r\n\r\n")
    except http.BadRequestError:
        return
    lines = request.head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert not any(byte in line for line in lines for byte in b"\r\n\0")
    fields = [line.split(b":")[0].lower() for line in lines[1:]]
    assert fields.count(b"host") == 1
    assert fields.count(b"content-length") + fields.count(b"transfer-encoding") <= 1
    assert all(field.strip() == field for field in fields)


@pytest.mark.parametrize(
    "line", [b"\r\n", b"g\r\n", b"-1\r\n", b"0x1\r\n", b"1" * 16 + b"\r\n", b"1 2\r\n", b"1;\0\r\n", b"+1\r\n", b" 1\r\n"]
)
def test_odd_chunks_are_refused(line: bytes) -> None:
    with pytest.raises(http.BadRequestError):
        http.chunk_bytes(line)


def test_names_are_compared_by_label() -> None:
    policy = Policy(Egress.allow("pypi.org", "*.Files.example.org"))
    for good in ("pypi.org", "PYPI.ORG.", "a.files.example.org", "a.b_c.files.example.org"):
        assert policy.check(good, 443) == good.lower().removesuffix(".")
    for bad in (
        "files.example.org",
        "xpypi.org",
        "pypi.org.evil.org",
        "pypi.org..",
        ".pypi.org",
        "a.pypi.org",
        "pypi.org\0.evil.org",
        "pypi。org",
        "",
        "1.2.3.4",
    ):
        with pytest.raises(Refused):
            policy.check(bad, 443)
    with pytest.raises(Refused, match="metadata"):
        Policy(Egress.allow("*.google.internal")).check("metadata.google.internal", 80)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_any_text_is_a_pattern_or_refused_in_one_sentence(text: str) -> None:
    try:
        pattern = parse_host(text)
    except ConfigError as error:
        refused = str(error)
    else:
        assert parse_host(pattern) == pattern
        assert host_name(pattern.removeprefix("*.")) == pattern.removeprefix("*.")
        refused = ""
    assert len(refused) < 250
    assert refused.isprintable()


def test_presets_are_patterns_in_their_final_form() -> None:
    for hosts in PRESETS.values():
        assert tuple(map(parse_host, hosts)) == hosts


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_only_public_addresses_are_let_through(address: addresses.Address) -> None:
    if addresses.refusal(address) is None and address not in ipaddress.ip_network("::/8"):  # there lie those that stand for others
        assert address.is_global
        assert not address.is_multicast
        assert not address.is_reserved


@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::1", "::ffff:8.8.8.8"])
def test_public_addresses_are(text: str) -> None:
    assert addresses.refusal(ipaddress.ip_address(text)) is None


def test_this_machines_own_addresses_are_refused() -> None:
    assert addresses.is_own(ipaddress.ip_address("127.0.0.1"))
    assert not addresses.is_own(ipaddress.ip_address("93.184.216.34"))


def test_what_was_refused_is_kept_in_bounds() -> None:
    log = BlockedLog()
    for number in range(2 * MOST_ENTRIES):
        log.add(Refused(f"\x1b[31m{number}.org" + "x" * 1000, 53, "no"))
        log.add(Refused("one.org", 53, "no"))
    entries = log.entries()
    assert len(entries) == MOST_ENTRIES
    assert log.dropped == MOST_ENTRIES + 1
    assert {entry.host: entry.count for entry in entries}["one.org"] == 2 * MOST_ENTRIES
    assert all(entry.host.isprintable() and len(entry.host) <= 253 for entry in entries)


def test_names_in_use_keep_addresses_of_their_own() -> None:
    given = StandIns()
    first = given.address("first.org")
    for number in range(10_000):
        address = given.address(f"h{number}.org")
        assert address != given.address("first.org") == first
        assert addresses.refusal(address) is not None
