"""Secrets at rest. In: values a caller wrote. Out: sealed versions in the store; environment and files for a sandbox that names them.

Values are sealed with AES-256-GCM under a key that lies only in the state folder, so a copy of the database alone tells nothing. The
API never returns a value.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sandmill.errors import StateIncompatible
from sandmill.server.records import Records, Value, now
from sandmill.server.refusals import Cause, Refusal, invalid, not_found
from sandmill.server.store import sealed_of
from sandmill.server.tables import Sealed

_NONCE_BYTES: Final = 12
_SHOWN_VERSIONS: Final = 10


class Given(NamedTuple):
    """What a sandbox is started with because of its secrets, and which versions that was."""

    env: dict[str, str]
    files: dict[str, bytes]
    versions: dict[str, int]


class Secrets:
    """Sealing, opening and mounting."""

    def __init__(self, records: Records, folder: Path) -> None:
        self._records = records
        self._cipher = AESGCM(_key(folder / "secret.key"))

    def take(self, value: Value, before: Value | None, author: str) -> tuple[Value, list[Sealed]]:
        """Moves the values out of a Secret being written: the object as stored, and the sealed version. Raises Refusal."""
        spec = dict(value["spec"])
        data = _decoded(spec.pop("data", {}), value["metadata"]["name"])
        data |= {key: text.encode() for key, text in spec.pop("stringData", {}).items()}
        status = {} if before is None else before["status"]
        if not data and before is not None:
            return {**value, "spec": spec, "status": status}, []
        version = status.get("version", 0) + 1
        info = {"version": version, "createTime": now(), "createdBy": author, "keys": sorted(data)}
        versions = [info, *status.get("versions", [])][:_SHOWN_VERSIONS]
        uid = value["metadata"]["uid"]
        plain = msgspec.json.encode({key: base64.b64encode(part).decode() for key, part in data.items()})
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, plain, f"{uid}/{version}".encode())
        status = {"phase": "Ready", "version": version, "keys": sorted(data), "versions": versions}
        return {**value, "spec": spec, "status": status}, [Sealed(uid, version, sealed)]

    async def given(self, sandbox: Value) -> Given:
        """Everything a sandbox's spec asks for. Raises Refusal naming what is missing."""
        spec, project = sandbox["spec"], sandbox["metadata"]["namespace"]
        given = Given({}, {}, {})
        for mount in spec.get("secrets", ()):
            version, data = await self._open(project, mount["name"], mount.get("version"))
            given.versions[mount["name"]] = version
            for key, part in data.items():
                given.files[f"{mount['name']}/{key}"] = part
                if key.isidentifier() and b"\0" not in part:
                    given.env[key] = part.decode("utf-8", "surrogateescape")
        for variable in spec.get("env", ()):
            if "valueFrom" not in variable:
                given.env[variable["name"]] = variable.get("value", "")
                continue
            reference = variable["valueFrom"]["secretKeyRef"]
            version, data = await self._open(project, reference["name"], None)
            if reference["key"] not in data:
                raise Refusal("Invalid", f"secret {reference['name']!r} has no key {reference['key']!a}")
            given.versions[reference["name"]] = version
            given.env[variable["name"]] = data[reference["key"]].decode("utf-8", "surrogateescape")
        return given

    def check(self, spec: Value, project: str) -> None:
        """Refuses a Sandbox that names secrets which are not there. Raises Refusal (Invalid)."""
        names = [(f"spec.secrets[{place}].name", mount["name"]) for place, mount in enumerate(spec.get("secrets", ()))]
        for place, variable in enumerate(spec.get("env", ())):
            if "valueFrom" in variable:
                names.append((f"spec.env[{place}].valueFrom.secretKeyRef.name", variable["valueFrom"]["secretKeyRef"]["name"]))
        missing = [
            Cause(at, "FieldValueNotFound", f"there is no secret {name!r}")
            for at, name in names
            if not self._records.get("Secret", project, name)
        ]
        if missing:
            raise invalid("sandboxes", "", missing)

    async def _open(self, project: str, name: str, version: int | None) -> tuple[int, Mapping[str, bytes]]:
        value = self._records.get("Secret", project, name)
        if value is None:
            raise not_found("secrets", name)
        number = version if version is not None else value["status"]["version"]
        uid = value["metadata"]["uid"]
        sealed = await self._records.store.read(sealed_of(uid, number))
        if sealed is None:
            raise Refusal("NotFound", f"secret {name!r} has no version {number}", kind="secrets", name=name)
        try:
            plain = self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], f"{uid}/{number}".encode())
        except InvalidTag as error:
            raise Refusal("Unavailable", f"secret {name!r} was sealed with another key than that of this state folder") from error
        data: dict[str, Any] = msgspec.json.decode(plain)
        return number, {key: base64.b64decode(part) for key, part in data.items()}


def _decoded(data: Mapping[str, str], name: str) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    wrong: list[Cause] = []
    for key, text in data.items():
        try:
            out[key] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            wrong.append(Cause(f"spec.data[{key!a}]", "FieldValueInvalid", "expected base64"))
    if wrong:
        raise invalid("secrets", name, wrong)
    return out


def _key(path: Path) -> bytes:
    """The sealing key, made on first use."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        key = path.read_bytes()
        if len(key) != 32:
            raise StateIncompatible(f"{path} is not a key of 32 bytes; restore it, or secrets stay closed") from None
        return key
    key = os.urandom(32)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    return key
