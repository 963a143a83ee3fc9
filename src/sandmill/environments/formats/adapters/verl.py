"""Runs beside verl's rewards, in their sandbox: rows of its data sets as tasks, `compute_score` as the grader.

verl runs a policy's program inside the process that knows the expected outputs, where it can look for them. Here it runs before that, as
another user and once for every input; what it wrote is then replayed to verl's own grader, whose comparison it remains.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterable
from typing import Any

COLUMNS = ("data_source", "prompt", "reward_model")
SEEN = ("images", "videos", "audios")
CODE = ("codecontests", "apps", "codeforces", "taco")
NAMES = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json builtins typing"
PRELUDE = "import sys\nsys.setrecursionlimit(600_000)\n" + "".join(f"from {name} import *\nimport {name}\n" for name in NAMES.split())
"""What verl puts before a program."""
RUN_S, ALL_S = 10.0, 120.0
LARGEST_OUTPUT = 16 << 20
MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")


class Verl:
    """The rows of one or two files, and one reward function. With verl's own rewards, programs run as another user than the grader."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.bundled = options["reward"] is None
        self.keeps_root = self.bundled
        self.function = bundled() if self.bundled else own(options["reward"], options["function"])
        names = inspect.signature(self.function).parameters
        self.batched, self.more = "solution_strs" in names, options["arguments"]
        unknown = next((name for name in self.more if name not in names), None)
        if unknown is not None and not any(one.kind is one.VAR_KEYWORD for one in names.values()):
            raise TypeError(f"{options['function']}() takes no {unknown!r}; it takes {', '.join(names)}")
        self.rows = {
            split: [self._row(row, file["name"], number) for number, row in enumerate(rows_of(file))]
            for split, file in options["data"].items()
        }

    def describe(self) -> dict[str, Any]:
        """See protocol.Description. verl's bundled rewards for competition mathematics go from -1 to 1."""
        version = importlib.metadata.version("verl") if self.bundled else "0"
        splits = {split: len(rows) for split, rows in self.rows.items()}
        return {"name": "verl", "version": version, "splits": splits, "reward": "a number, its range as the reward function has it"}

    def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """See protocol.Row."""
        return self.rows[split][start:stop]

    def _row(self, row: dict[str, Any], file: str, number: int) -> dict[str, Any]:
        place = f"{file}, row {number}"
        for column in COLUMNS:
            if column in row and row[column] is None:
                raise LookupError(f"{place}: column {column!r} is None")
            if column not in row:
                near = difflib.get_close_matches(column, row, n=1, cutoff=0.6)
                raise LookupError(f"{place}: column {column!r} is missing{f', or is it {near[0]!r}?' if near else ''}")
        seen = next((column for column in SEEN if row.get(column) is not None and len(row[column])), None)
        if seen is not None:
            raise TypeError(f"{place}: column {seen!r} is not empty, and a policy here is given text only")
        model = row["reward_model"]
        if not isinstance(model, dict) or model.get("ground_truth") is None:
            raise LookupError(f"{place}: column 'reward_model' has no ground_truth")
        messages = [self._message(message, place) for message in row["prompt"]] if isinstance(row["prompt"], (list, tuple)) else None
        if not messages:
            raise TypeError(f"{place}: column 'prompt' is a {type(row['prompt']).__name__}, not a list of messages")
        source = str(row["data_source"])
        more = without_none(row.get("extra_info") or {})
        if not isinstance(more, dict):
            raise TypeError(f"{place}: column 'extra_info' is a {type(more).__name__}, not a mapping")
        return {
            "prompt": messages,
            "answer": answer_of(source, model["ground_truth"]) if self.bundled else None,
            "id": None if row.get("id") is None else str(row["id"]),
            "metadata": {"data_source": source, **({"ability": str(row["ability"])} if row.get("ability") else {})},
            "row": {"data_source": source, "ground_truth": model["ground_truth"], "extra_info": more},
        }

    def _message(self, message: Any, place: str) -> dict[str, str]:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise TypeError(f"{place}: column 'prompt' holds {message!a:.60}, not a message with role and content as text")
        return {"role": str(message.get("role", "user")), "content": message["content"]}

    async def grade(self, row: dict[str, Any], answer: str | None, context: dict[str, Any]) -> Any:
        """As verl calls it: by keyword, with the number of turns in extra_info; one that is written for batches gets a batch of one.

        A mapping's other numbers are parts of the score.
        """
        answer = answer or ""
        if self.bundled and row["data_source"] in CODE:
            answer = replayed(answer, row["ground_truth"])
        else:
            drop_root()
        extra = {**row["extra_info"], "num_turns": context.get("turns", 1), "rollout_reward_scores": {}}
        given = {"data_source": row["data_source"], "solution_str": answer, "ground_truth": row["ground_truth"], "extra_info": extra}
        if self.batched:
            given = {f"{name}s": [value] for name, value in given.items()}
        found = self.function(**given, **self.more)
        if inspect.isawaitable(found):
            found = await found
        if self.batched:
            found = one_of(found)
        if not isinstance(found, dict):
            return found
        if "score" not in found:
            raise LookupError(f"the reward function returned a mapping without 'score': it has {', '.join(map(str, found))[:100]}")
        parts = {str(name): value for name, value in found.items() if name != "score" and isinstance(value, (bool, int, float))}
        return {"reward": found["score"], "parts": parts}


def drop_root() -> None:
    """From here on as the user that this call has to itself."""
    if os.geteuid() == 0:
        uid = int(os.environ["SANDMILL_UID"])
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def replayed(completion: str, truth: Any) -> str:
    """A program that gives for each input what the completion's gave, and does nothing else."""
    program = completion.split("```python")[-1].split("```")[0]
    tests = truth if isinstance(truth, dict) else json.loads(truth)
    function = tests.get("fn_name")
    outputs: dict[str, str | None] = {}
    until = time.monotonic() + ALL_S
    for given in tests["inputs"]:
        text = "\n".join(given) if isinstance(given, list) else given
        if text not in outputs:
            outputs[text] = ran(program, text, function, min(RUN_S, until - time.monotonic()))
    record = repr(outputs)
    if function is None:
        lines = [
            f"record = {record}",
            "found = record[sys.stdin.read()]",
            "if found is None: raise RuntimeError",
            "sys.stdout.write(found)",
        ]
    else:
        known = {json.dumps(arguments_of(text)): found for text, found in outputs.items()}
        lines = [f"def {function}(*given):", f"    return json.loads({known!r}[json.dumps(list(given))])"]
    return "```python\n" + "\n".join(lines) + "\n```"


def arguments_of(text: str) -> list[Any]:
    """One argument a line. JSON has only text for keys; verl undoes that for the first."""
    found = [json.loads(line) for line in text.split("\n")]
    if isinstance(found[0], dict):
        try:
            return [{int(key): value for key, value in found[0].items()}]
        except ValueError:
            return found
    return found


def ran(program: str, given: str, function: str | None, patience_s: float) -> str | None:
    """What a program printed, or its function returned as JSON; None when it failed, took too long or said too much."""
    if patience_s <= 0:
        return None
    if function is None:
        script, stdin = f"{PRELUDE}\n{program}", given
    else:
        owner = "Solution()." if "class Solution" in program else ""
        script = (
            "import json as __json, os as __os\n__output = __os.fdopen(__os.dup(1), 'w')\n__os.dup2(2, 1)\n"
            f"__given = {arguments_of(given)!r}\n{PRELUDE}\n{program}\n"
            f"__output.write(__json.dumps({owner}{function}(*__given)))\n__output.flush()\n"
        )
        stdin = ""
    uid = int(os.environ["SANDMILL_UID"]) if os.geteuid() == 0 else None
    with open("program.py", "wb") as file:
        file.write(script.encode("utf-8", "replace"))
    with open("input", "wb") as file:
        file.write(stdin.encode("utf-8", "replace"))
    with open("input", "rb") as reading, open("output", "w+b") as writing:
        process = subprocess.Popen(
            [sys.executable, "-I", "program.py"],
            stdin=reading,
            stdout=writing,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"},
            start_new_session=True,
            preexec_fn=lambda: become(uid),
        )
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None if code != 0 else os.pread(writing.fileno(), LARGEST_OUTPUT, 0).decode("utf-8", "replace")


def become(uid: int | None) -> None:
    """In the process of a program, before it starts."""
    resource.setrlimit(resource.RLIMIT_NPROC, (32, 32))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_OUTPUT, LARGEST_OUTPUT))
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def one_of(found: Any) -> Any:
    """The one score of a batch of one."""
    if isinstance(found, (str, bytes, dict)) or not hasattr(found, "__len__") or len(found) != 1:
        raise TypeError(f"the reward function gave {found!a:.80} for a batch of one, not a list with its score")
    return found[0]


def rows_of(file: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of a parquet, json or jsonl file. Raises ValueError and TypeError naming it, and the line."""
    path, name = file["file"], file["name"]
    rows: Any
    try:
        if path.endswith(".parquet"):
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            with open(path, encoding="utf-8") as stream:
                rows = lines_of(stream) if path.endswith(".jsonl") else json.load(stream)
    except (ValueError, OSError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None
    wrong = next((number for number, row in enumerate(rows) if not isinstance(row, dict)), None) if isinstance(rows, list) else 0
    if wrong is not None:
        raise TypeError(f"{name}, row {wrong} is no mapping of columns to values")
    return list(rows)


def lines_of(stream: Iterable[str]) -> list[Any]:
    """A JSON value a line, empty ones left out."""
    found = []
    for number, line in enumerate(stream, 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from None
    return found


def without_none(value: Any) -> Any:
    """Parquet gives every row the keys of all, as None; a reward function's `get(key, default)` must not meet those."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value


def answer_of(source: str, truth: Any) -> str | None:
    """A completion that verl's bundled reward for this source takes as right, where it is plain how one looks."""
    if isinstance(truth, dict) and source.startswith("searchR1_"):
        target = truth.get("target")
        return f"<answer>{target[0] if isinstance(target, list) and target else target}</answer>"
    if not isinstance(truth, (str, int, float)):
        return None
    if source == "openai/gsm8k":
        return f"#### {truth}"
    if source in MATH:
        return f"\\boxed{{{truth}}}"
    return f"Answer: {truth}" if source in ("math_dapo", "math", "math_dapo_reasoning") or source.startswith("aime") else None


def bundled() -> Any:
    """verl's own dispatch, without `import verl`, which would want ray and torch."""
    where = os.path.dirname(importlib.metadata.distribution("verl").locate_file("verl/protocol.py"))  # type: ignore[call-overload]
    for name, path in (("verl", str(where)), ("verl.utils", os.path.join(str(where), "utils"))):
        module = types.ModuleType(name)
        module.__path__ = [path]
        sys.modules[name] = module
    return importlib.import_module("verl.utils.reward_score").default_compute_score


def own(path: str, function: str) -> Any:
    """A function of a file, whose folder is importable."""
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("custom_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_module"] = module
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        near = difflib.get_close_matches(function, vars(module), n=1, cutoff=0.4)
        raise AttributeError(f"{os.path.basename(path)} has no function {function!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    return found


def load(options: dict[str, Any]) -> Verl:
    """The files and the reward function that `options` name."""
    return Verl(options)
