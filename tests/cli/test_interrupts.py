"""Ctrl-C once asks, twice stops; in a process of its own with real signals."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

LOOP = """
import signal, sys, time
from sandmill.cli.interrupts import Interrupts
said = []
with Interrupts(lambda: print("asked", flush=True)) as interrupts:
    try:
        print("ready", flush=True)
        while not interrupts.requested or sys.argv[1] == "stubborn":
            time.sleep(0.01)
        print("saved", flush=True)
    except KeyboardInterrupt:
        print("at once", flush=True)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
sys.exit(interrupts.exit_code)
"""


@pytest.fixture
def started(sandmill):
    processes = []

    def start(mode):
        process = subprocess.Popen([sys.executable, "-c", LOOP, mode], env=sandmill.env, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks(started, number, code):
    process = started("polite")
    process.send_signal(number)
    assert sorted(process.stdout.read().split()) == ["asked", "saved"]
    assert process.wait(10) == code


def test_the_second_ctrl_c_stops_at_once(started):
    process = started("stubborn")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.read() == "at once\n"
    assert process.wait(10) == 130
