"""Task folders in both layouts, written for the tests: what each asks is so small that its verifier takes a moment."""

# ruff: noqa: E501 - texts of files

from __future__ import annotations

from pathlib import Path

UVX_VERIFIER = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
GREETING_TEST = """import pathlib

def test_greeting():
    assert pathlib.Path("/app/greeting.txt").read_text() == "hello\\n"
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
    return root


def greeting(root: Path, *, verifier: str = UVX_VERIFIER, toml: str = "", name: str = "greeting") -> Path:
    """The commonest shape: a file has to be written, pytest looks at it."""
    head = f'schema_version = "1.4"\n[task]\nname = "own/{name}"\n[metadata]\ndifficulty = "easy"\n'
    return write(
        root / name,
        {
            "task.toml": toml or head + "[verifier]\ntimeout_sec = 60.0\n[environment]\nmemory_mb = 512\nstorage_mb = 256\n",
            "instruction.md": "<!-- canary GUID 1234 -->\n\nWrite `hello` into /app/greeting.txt.\n",
            "environment/Dockerfile": 'FROM ubuntu:24.04\nLABEL a="b"\nWORKDIR /app\nENV TONE=warm\nCOPY seed.txt ./\nCMD ["sleep", \\\n  "1"]\n',
            "environment/seed.txt": "seed\n",
            "tests/test.sh": verifier,
            "tests/test_outputs.py": GREETING_TEST,
            "solution/solve.sh": "#!/bin/bash\nset -e\n[ $TONE = warm ]\necho hello > greeting.txt\n",
        },
    )


def program(root: Path) -> Path:
    """A program has to be mended; tests import it, as careless verifiers do, and run it."""
    test = """import subprocess, sys
sys.path.insert(0, "/app")

def test_import():
    import adding
    assert adding.add(2, 3) == 5

def test_run():
    assert subprocess.run(["python3", "/app/adding.py", "4", "5"], capture_output=True, text=True).stdout == "9\\n"
"""
    body = "import sys\n\n\ndef add(a, b):\n    return a - b\n\n\nif __name__ == '__main__':\n    print(add(int(sys.argv[1]), int(sys.argv[2])))\n"
    return write(
        root / "program",
        {
            "task.toml": '[task]\nname = "own/program"\n[verifier]\ntimeout_sec = 60\n',
            "instruction.md": "Mend /app/adding.py so that it adds.",
            "environment/Dockerfile": "FROM python:3.13-slim\nWORKDIR /app\nCOPY adding.py .\n",
            "environment/adding.py": body,
            "tests/test.sh": UVX_VERIFIER,
            "tests/test_outputs.py": test,
            "solution/solve.sh": "#!/bin/bash\nsed -i 's/a - b/a + b/' adding.py\n",
        },
    )


def answer(root: Path) -> Path:
    """An answer file is compared with the expected one among the tests."""
    verifier = "#!/bin/bash\nif diff /tests/expected_answer.txt /app/answer.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    return write(
        root / "answer",
        {
            "task.toml": '[task]\nname = "own/answer"\n',
            "instruction.md": "Write the answer into answer.txt.",
            "environment/Dockerfile": "FROM debian\nWORKDIR /app\n",
            "tests/test.sh": verifier,
            "tests/expected_answer.txt": "42\n",
            "solution/solve.sh": "#!/bin/bash\necho 42 > answer.txt\n",
        },
    )


def scores(root: Path) -> Path:
    """Several rewards by name, and no pytest."""
    verifier = """#!/bin/bash
words=$(wc -w < /app/poem.txt 2>/dev/null || echo 0)
lines=$(wc -l < /app/poem.txt 2>/dev/null || echo 0)
echo "{\\"length\\": $([ "$words" -ge 3 ] && echo 1.0 || echo 0.0), \\"shape\\": $([ "$lines" -eq 2 ] && echo 1 || echo 0.25)}" > /logs/verifier/reward.json
"""
    return write(
        root / "scores",
        {
            "task.toml": 'version = "1.0"\n[task]\nname = "own/scores"\n[environment]\nmemory = "512M"\n',
            "instruction.md": "Write a poem of two lines into poem.txt.",
            "environment/Dockerfile": "FROM alpine\nWORKDIR /app\n",
            "tests/test.sh": verifier,
            "solution/solve.sh": "#!/bin/sh\nprintf 'roses are red\\nand so on\\n' > poem.txt\n",
        },
    )


def steps(root: Path, *, strategy: str = "mean") -> Path:
    """Three steps; the second one's work undoes what the first one's tests look at."""
    toml = f'schema_version = "1.4"\nmulti_step_reward_strategy = "{strategy}"\n[task]\nname = "own/steps"\n'
    toml += "".join(f'[[steps]]\nname = "{name}"\nmin_reward = 0.5\n' for name in ("one", "two", "three"))
    files = {"task.toml": toml, "environment/Dockerfile": "FROM debian\nWORKDIR /app\n"}
    checks = {
        "one": '[ "$(cat state)" = one ]',
        "two": '[ "$(cat state)" = two ] && [ -e given ] && [ -e made ]',
        "three": "[ ! -e state ]",
    }
    solutions = {"one": "echo one > state", "two": "echo two > state", "three": "rm state"}
    for name in checks:
        files |= {
            f"steps/{name}/instruction.md": f"Step {name}.",
            f"steps/{name}/tests/test.sh": f"#!/bin/bash\nif {checks[name]}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
            f"steps/{name}/solution/solve.sh": f"#!/bin/bash\n{solutions[name]}\n",
        }
    files |= {"steps/two/workdir/given": "given\n", "steps/two/workdir/setup.sh": "#!/bin/bash\ntouch made\n"}
    return write(root / "steps", files)


def old(root: Path) -> Path:
    """The older layout: graded by what pytest's tests came to."""
    script = "#!/bin/bash\npip install pytest==8.3\nuv init\nuv add pytest==8.4.1\nuv run pytest $TEST_DIR/test_outputs.py -rA\n"
    return write(
        root / "old",
        {
            "task.yaml": "instruction: |-\n  Write `hello` into /app/greeting.txt.\nauthor_name: A\ndifficulty: easy\ncategory: files\ntags: [a]\n"
            "parser_name: pytest\nmax_agent_timeout_sec: 360.0\nmax_test_timeout_sec: 60.0\nrun_tests_in_same_shell: false\n",
            "docker-compose.yaml": "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n    command: ['sh', '-c', 'sleep infinity']\n",
            "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/python-3-13:20250620\nWORKDIR /app\n",
            "run-tests.sh": script,
            "tests/test_outputs.py": GREETING_TEST,
            "solution.yaml": "- command: echo hello > greeting.txt\n  min_timeout_sec: 1.0\n  block: true\n",
        },
    )
