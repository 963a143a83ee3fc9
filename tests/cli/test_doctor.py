"""`sandmill doctor` tells the truth about this machine, in words and as JSON."""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import version


def test_words_and_json_say_the_same(sandmill):
    sandmill.env["SANDMILL_STATE"] = str(sandmill.folder / "state")
    told = json.loads(sandmill("doctor", "--json").stdout)
    said = sandmill("doctor")
    names = {finding["name"]: finding for finding in told["findings"]}
    assert names["torch"]["says"] == version("torch")
    assert {"python", "sandboxes", "memory", "disk", "cores", "sandmill/tiny-shell", "sandmill/smollm2-135m", "torch works"} <= names.keys()
    assert said.returncode == (0 if told["ready"] else 3)
    assert all(name in said.stdout.decode() for name in names)
    assert ("the demo can run here" in said.stdout.decode()) == told["ready"]


def test_what_is_missing_comes_with_its_fix_and_a_non_zero_code(sandmill):
    sandmill.env["SANDMILL_STATE"] = "/proc/cannot-be-written"
    done = sandmill("doctor", "--json")
    told = json.loads(done.stdout)
    broken = [finding for finding in told["findings"] if finding["blocks"]]
    assert done.returncode == 3
    assert not told["ready"]
    assert broken
    assert all(finding["fix"] for finding in broken)
    assert "fix: " in sandmill("doctor").stdout.decode()


def test_every_backend_is_named_with_its_fix_where_it_cannot_be_used(sandmill):
    sandmill.env |= {"SANDMILL_STATE": str(sandmill.folder / "state"), "KUBECONFIG": str(sandmill.folder / "none"), "E2B_API_KEY": ""}
    told = json.loads(sandmill("doctor", "--json").stdout)
    backends = {finding["name"].removeprefix("backend "): finding for finding in told["findings"] if finding["name"].startswith("backend ")}
    assert backends.keys() == {"gvisor", "e2b", "kubernetes", "server"}
    assert not any(finding["blocks"] for finding in backends.values())
    assert backends["gvisor"]["ok"] is (True if shutil.which("runsc") and os.geteuid() == 0 else None)
    for name, needed in (("e2b", "E2B_API_KEY"), ("kubernetes", "KUBECONFIG"), ("server", "SANDMILL_API_URL")):
        assert backends[name]["ok"] is None
        assert needed in backends[name]["fix"]
