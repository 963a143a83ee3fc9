"""`sandmill sandbox`: real sandboxes through the real command; their list is this test's own (SANDMILL_STATE)."""

from __future__ import annotations

import json
import signal
import termios
import time

import pytest
from shell_terminal import Terminal

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def own_state(sandmill):
    sandmill.env["SANDMILL_STATE"] = str(sandmill.folder / "state")


def test_output_and_exit_code_are_the_commands_own(sandmill):
    done = sandmill("sandbox", "run", "--", "sh", "-c", r"printf 'out\377\000'; printf 'err\n' >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\xff\x00", b"err\n")


def test_options_reach_the_sandbox(sandmill):
    (sandmill.folder / "in.bin").write_bytes(b"\0\xff data")
    words = ["--env", "A=b=c", "--workdir", "/work/here", "--file", "in.bin:sub/x", "--memory", "64Mi", "--disk", "4Mi", "--cpu", "500m"]
    done = sandmill(
        "sandbox", "run", *words, "--", "sh", "-c", "echo $A; pwd; od -An -c sub/x | head -1; id -un; head -c 8000000 /dev/zero > big"
    )
    assert done.stdout.decode().split("\n")[:2] == ["b=c", "/work/here"]
    assert b"\\0 377" in done.stdout
    assert b"\nuser\n" in done.stdout
    assert b"No space left on device" in done.stderr
    assert done.returncode == 1


LOOK_UP = "import socket, sys; [print(socket.gethostbyname(name)) for name in sys.argv[1:]]"


def test_a_sandbox_reaches_nothing_unless_told(sandmill):
    done = sandmill("sandbox", "run", "--", "python3", "-c", LOOK_UP, "a.example.org")
    assert (done.returncode, done.stdout) == (1, b"")
    done = sandmill(
        "sandbox", "run", "--allow", "*.example.org", "--preset", "pypi", "--", "python3", "-c", LOOK_UP, "a.example.org", "pypi.org"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"198.18.0.1\n198.18.0.2\n", b"")
    done = sandmill("sandbox", "run", "--allow", "a.example.org", "--", "python3", "-c", LOOK_UP, "a.example.org", "b.example.org")
    assert (done.returncode, done.stdout) == (1, b"198.18.0.1\n")
    assert b"sandmill: refused b.example.org: " in done.stderr
    private = "import socket; socket.create_connection(('169.254.169.254', 80), 5).recv(1)"
    done = sandmill("sandbox", "run", "--network", "open", "--", "python3", "-c", private)
    assert (done.returncode, b"sandmill: refused 169.254.169.254:80: " in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--network", "opne"], "--network: it is none or open, not 'opne'; did you mean open?"),
        (["--network", "open", "--allow", "x.org"], "--allow: hosts are allowed one by one or all at once"),
        (["--network", "none", "--preset", "pypi"], "--preset: hosts are allowed one by one or all at once"),
        (["--allow", "http://x/"], "--allow:"),
        (["--allow", "10.0.0.1"], "--allow:"),
        (["--preset", "pypy"], "pypi"),
        (["--image", "nothing"], "no image 'nothing'"),
    ],
)
def test_networks_and_images_that_make_no_sense(sandmill, words, said):
    done = sandmill("sandbox", "run", *words, "--", "true")
    assert (done.returncode, done.stdout) == (2 if words[0] != "--image" else done.returncode, b"")
    assert done.returncode
    assert said in done.stderr.decode()


def test_files_are_kept_as_an_image_whatever_the_exit_code(sandmill):
    done = sandmill("sandbox", "run", "--save", "prepared", "--", "sh", "-c", "echo work > w; echo home > ~/h; exit 3")
    assert done.returncode == 3, done.stderr
    assert sandmill("sandbox", "run", "--image", "prepared", "--", "sh", "-c", "cat w ~/h").stdout == b"work\nhome\n"


def test_options_after_the_command_belong_to_the_command(sandmill):
    assert sandmill("sandbox", "run", "echo", "--json", "--help").stdout == b"--json --help\n"
    assert sandmill("sandbox", "run", "--", "echo", "--debug").stdout == b"--debug\n"


def test_standard_input_is_closed_unless_asked_for(sandmill):
    assert sandmill("sandbox", "run", "--", "cat", stdin=None, input=b"secret").stdout == b""
    assert sandmill("sandbox", "run", "-i", "--", "cat", stdin=None, input=b"given").stdout == b"given"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--", "no-such-program"], 127, "'no-such-program' cannot be started in the sandbox: No such file or directory"),
        (["--", "/etc"], 126, "cannot be started"),
        (["--", "sh", "-c", "kill -9 $$"], 137, ""),
        (["--timeout", "200ms", "--", "sleep", "60"], 124, "stopped after 200ms"),
        (["--memory", "2GB", "--", "true"], 2, 'write "2G"'),
        (["--env", "novalue", "--", "true"], 2, "--env: write it as NAME=VALUE"),
        (["--file", "nowhere:x", "--", "true"], 2, "--file: nowhere cannot be read: No such file or directory"),
        (["--timeout", "5min", "--", "true"], 2, "--timeout: '5min' is not a duration: no unit 'min' (ns, us, ms, s, m, h); write \"5m\""),
        (["--user", "alice", "--", "true"], 2, "user must be 'user' or 'root'"),
    ],
)
def test_how_a_command_can_fail(sandmill, words, code, said):
    done = sandmill("sandbox", "run", *words)
    assert done.returncode == code, done.stderr
    assert said in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_a_reader_that_goes_away_ends_the_command(sandmill):
    with sandmill.start("sandbox", "run", "--", "yes") as started:
        assert started.stdout.read(2) == b"y\n"
        started.stdout.close()
        assert started.wait(DEADLINE_S) == 141
        assert started.stderr.read() == b""


def listed(sandmill):
    return json.loads(sandmill("sandbox", "ls", "--json").stdout)


def wait_until(what):
    end = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.1)
    return found


def test_list_and_stop(sandmill):
    assert listed(sandmill) == []
    with sandmill.start("sandbox", "run", "--", "sleep", "300") as first, sandmill.start("sandbox", "run", "--", "sleep", "300") as second:
        found = wait_until(lambda: len(known := listed(sandmill)) == 2 and known)
        table = sandmill("sandbox", "ls").stdout.decode().splitlines()
        assert table[0].split() == ["name", "age", "cpu", "memory", "disk", "owner", "labels"]
        assert {line.split()[0] for line in table[1:]} == {one["name"] for one in found}
        done = sandmill("sandbox", "stop", found[0]["name"], "nobody")
        assert done.stdout.decode() == f"stopped {found[0]['name']}\n"
        assert done.returncode == 4
        assert b"nobody" in done.stderr
        assert sandmill("sandbox", "stop", "--all").stdout.decode() == f"stopped {found[1]['name']}\n"
        assert first.wait(DEADLINE_S) != 0
        assert second.wait(DEADLINE_S) != 0
    assert listed(sandmill) == []
    assert b"name the sandboxes to stop" in sandmill("sandbox", "stop").stderr


def test_ctrl_c_ends_the_command_and_its_sandbox(sandmill):
    with sandmill.start("sandbox", "run", "--", "sleep", "300") as started:
        wait_until(lambda: listed(sandmill))
        started.send_signal(signal.SIGINT)
        assert started.wait(DEADLINE_S) == 130
        assert started.stderr.read().startswith(b"error: stopped at once")
    assert listed(sandmill) == []


def test_a_shell_without_a_terminal_says_so(sandmill):
    done = sandmill("sandbox", "shell")
    assert done.returncode == 2
    assert b"a shell needs a terminal on standard input and output" in done.stderr


@pytest.fixture
def terminal(sandmill):
    opened = Terminal(sandmill, "sandbox", "shell", "--env", "PLACE=inside")
    yield opened
    opened.close()


def test_a_shell_has_a_terminal_of_its_own_and_gives_ours_back(terminal):
    terminal.shows_its_sizes(b"echo at $PLACE as $(id -un)", b"at inside as user")
    terminal.type(b"sleep 300\r\x03")
    terminal.until(b"^C")
    terminal.is_given_back()


def test_a_killed_shell_gives_the_terminal_back(terminal):
    terminal.until(b"[sandbox]")
    assert termios.tcgetattr(terminal.theirs) != terminal.before
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(DEADLINE_S) == 143
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_a_command_and_its_end_as_json(sandmill):
    done = sandmill("sandbox", "run", "--json", "--", "sh", "-c", r"printf 'a\377'; echo b >&2; exit 7")
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr, told["exit_code"], told["signal"], told["timed_out"]) == (7, b"", 7, None, False)
    assert told["stdout"].encode("utf-8", "surrogateescape") == b"a\xff"
    assert told["stderr"] == "b\n"
    late = sandmill("sandbox", "run", "--json", "--timeout", "300ms", "--", "sleep", "60")
    assert (late.returncode, json.loads(late.stdout)["exit_code"], json.loads(late.stdout)["timed_out"]) == (124, 124, True)


def test_a_server_that_is_not_there_is_named_with_the_way_out(sandmill):
    sandmill.env |= {"SANDMILL_API_URL": "http://127.0.0.1:1", "SANDMILL_API_KEY": "x"}
    done = sandmill("sandbox", "run", "--", "true")
    assert done.returncode == 4
    assert done.stderr.startswith(b"error: the server http://127.0.0.1:1 cannot be reached: ")
    assert b"`sandmill serve`" in done.stderr
    assert b"unset SANDMILL_API_URL" in done.stderr
