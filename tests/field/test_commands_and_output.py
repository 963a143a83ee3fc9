"""Field cases A: what other people's sandboxes did with commands and their output. Each test carries the repository and number."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from sandmill.sandboxes import PIPE, Sandbox


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox.create(memory="256Mi", disk="32Mi") as sandbox:
        yield sandbox


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.case(1)
def test_nano_rlm_61_mini_swe_agent_154_odd_bytes_do_not_end_the_episode(box: Sandbox) -> None:
    done = box.run("printf", "a\\360b")
    assert done.stdout == b"a\xf0b"
    process = box.exec("printf", "a\\360b")
    assert process.stdout.read() == "a\ufffdb"
    assert box.exec("printf", "a\\360b").stdout.read_bytes() == b"a\xf0b"
    assert box.run("echo", "still here").stdout == b"still here\n"


@pytest.mark.case(1)
def test_swe_agent_697_a_character_split_between_chunks_is_one_character(box: Sandbox) -> None:
    process = box.exec("sh", "-c", "printf '\\303'; sleep 0.1; printf '\\244'")
    assert "".join(str(piece) for piece in process.stdout) == "ä"


@pytest.mark.case(2)
@pytest.mark.parametrize("script", ["sleep 30 & echo started", "(sleep 30; echo late) & echo started", "setsid sleep 30 & echo started"])
def test_docker_agent_2462_bux_163_moby_33039_background_child_keeps_the_pipe(box: Sandbox, script: str) -> None:
    began = time.monotonic()
    done = box.run("bash", "-c", script, timeout=20)
    assert (done.exit_code, done.stdout, done.timed_out) == (0, b"started\n", False)
    process = box.exec("bash", "-c", script, timeout=20)
    assert process.wait() == 0
    assert process.stdout.read() == "started\n"
    assert time.monotonic() - began < 5


@pytest.mark.case(2)
def test_moby_33039_the_deadline_is_wall_clock_even_when_a_daemon_holds_the_pipe(box: Sandbox) -> None:
    began = time.monotonic()
    done = box.run("bash", "-c", "sleep 60 & echo x; sleep 60", timeout=0.3)
    assert done.timed_out
    assert done.stdout == b"x\n"
    assert time.monotonic() - began < 5


@pytest.mark.case(3)
def test_microsandbox_1549_an_open_stdin_of_the_caller_changes_nothing() -> None:
    """`sleep 1000 | exec -- cat`: the command sees end of file at once, and its timeout fires whatever the caller's stdin does."""
    code = (
        "from sandmill.sandboxes import Sandbox\n"
        "with Sandbox.create(memory='64Mi', disk='8Mi') as box:\n"
        "    print(box.run('cat').exit_code, box.exec('cat').wait(), box.run('sleep', '60', timeout=0.2).timed_out)\n"
    )
    held, kept_open = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", code], stdin=held, capture_output=True, timeout=60, check=True)
    finally:
        os.close(held)
        os.close(kept_open)
    assert done.stdout == b"0 0 True\n"


@pytest.mark.case(4)
def test_sandlock_149_both_streams_are_drained_while_the_command_runs(box: Sandbox) -> None:
    script = "import sys; [(sys.stdout.write('x' * 40000), sys.stderr.write('y' * 40000)) for _ in range(8)]"
    done = box.run("python3", "-c", script, timeout=30)
    assert (len(done.stdout), len(done.stderr), done.exit_code) == (320_000, 320_000, 0)
    process = box.exec("python3", "-c", script, timeout=30)
    assert process.wait() == 0  # nobody has read yet
    assert (len(process.stdout.read()), len(process.stderr.read())) == (320_000, 320_000)


@pytest.mark.case(5)
@pytest.mark.parametrize("face", ["run", "exec"])
def test_inspect_ai_836_a_flood_is_capped_at_the_source_in_constant_memory_and_ends(box: Sandbox, face: str) -> None:
    before = rss_bytes()
    if face == "run":
        done = box.run("yes", timeout=60, max_output=100_000)
        assert (len(done.stdout), done.truncated, done.timed_out, done.signal) == (100_000, True, False, 9)
    else:
        process = box.exec("yes", timeout=60, max_output=100_000)
        assert process.wait() == -9
        assert len(process.stdout.read_bytes()) == 100_000
        assert process.truncated
        assert not process.timed_out
    assert rss_bytes() - before < 16 << 20
    assert b"yes" not in box.run("ps", "-eo", "comm").stdout


@pytest.mark.case(5)
def test_inspect_ai_836_a_long_but_finite_output_ends_by_itself(box: Sandbox) -> None:
    done = box.run("bash", "-c", "head -c 3000000 /dev/zero; echo end >&2", max_output=1000)
    assert (len(done.stdout), done.stderr, done.truncated, done.exit_code) == (1000, b"end\n", True, 0)


@pytest.mark.case(7)
def test_hermes_agent_31417_jupyter_ai_acp_client_32_one_line_longer_than_64_kib(box: Sandbox) -> None:
    done = box.run("python3", "-c", "print('z' * 300000)")
    assert done.stdout == b"z" * 300_000 + b"\n"
    process = box.exec("python3", "-c", "print('z' * 300000)")
    assert sum(len(piece) for piece in process.stdout) == 300_001


@pytest.mark.case(10)
def test_sandbox_sdk_602_daytona_4230_a_heredoc_never_poisons_the_next_command(box: Sandbox) -> None:
    """Everything on one line: bash meets end of file inside the heredoc. The next command has its own shell and its own stdin."""
    broken = box.run("bash", "-c", "cat > f <<'EOF' a b EOF", timeout=5)
    assert not broken.timed_out
    assert box.run("bash", "-c", "echo fine").stdout == b"fine\n"
    script = "cat > g <<'EOF'\none\ntwo\nEOF\nwc -l < g\n"
    assert box.run("bash", "-c", script).stdout == b"2\n"
    assert box.run("bash", "-s", stdin=script.encode()).stdout == b"2\n"


@pytest.mark.case(10)
def test_sandbox_sdk_139_a_hung_command_does_not_stop_the_next(box: Sandbox) -> None:
    hung = box.exec("cat", stdin=PIPE)
    assert box.run("echo", "next", timeout=5).stdout == b"next\n"
    hung.stdin.write("echoed\n")
    hung.stdin.close()
    assert (hung.wait(timeout=5), hung.stdout.read()) == (0, "echoed\n")


@pytest.mark.case(1)
def test_inspect_k8s_sandbox_206_terminal_codes_and_nul_pass_through_as_bytes(box: Sandbox) -> None:
    assert box.run("printf", "\\033[2J\\000\\377").stdout == b"\x1b[2J\x00\xff"


@pytest.mark.case(7)
def test_hermes_agent_31417_a_consumer_that_waits_sees_output_as_it_comes(box: Sandbox) -> None:
    process = box.exec("bash", "-c", "echo first; read line; echo second", stdin=PIPE)
    pieces = iter(process.stdout)
    assert next(pieces) == "first\n"
    threading.Timer(0.05, process.stdin.write, args=("go\n",)).start()
    assert next(pieces) == "second\n"
    assert process.wait(timeout=5) == 0
