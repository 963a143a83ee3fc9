"""verl 0.9.1 from its index, without its dependencies: its bundled rewards give what they give in verl, on data sets in its formats.

Installs verl (7 MB), numpy and pyarrow (68 MB and 200 MB).
"""

import asyncio
import json

import pytest
from playing import environment, graded

from sandmill.environments.formats.verl import NUMPY, PYARROW
from sandmill.environments.packages.install import install
from sandmill.environments.packages.package import Package
from sandmill.environments.packages.wheels import PYTHON
from sandmill.environments.task import Graded
from sandmill.sandboxes import Sandbox

CODE = '{"inputs": ["1 2\\n", "3 4\\n"], "outputs": ["3\\n", "7\\n"]}'
ADDS = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
CALLED = '{"fn_name": "add", "inputs": ["1\\n2", "3\\n4"], "outputs": ["3", "7"]}'
FRAMES = """```python
import sys
frame = sys._getframe()
while frame is not None and "in_outs" not in frame.f_locals:
    frame = frame.f_back
print(frame.f_locals["in_outs"]["outputs"][frame.f_locals["index"]] if frame else "nothing")
```"""
"""What an agent does that takes the expected outputs from its grader instead of computing them."""
FILES = """```python
import glob, os, re
found = b""
for path in glob.glob("/opt/env/files/**", recursive=True) + glob.glob("/proc/[0-9]*/*") + glob.glob("/tmp/**", recursive=True):
    try:
        with open(path, "rb") as file:
            found += file.read(1 << 20)
    except OSError:
        pass
print(3 if b"outputs" in found and input() == "1 2" else 7 if b"outputs" in found else "nothing")
```"""
"""The same, from anything that it can open."""
CASES = [
    ("openai/gsm8k", "72", "so #### 72", 1.0),
    ("openai/gsm8k", "72", "so #### 72.0", 0.0),
    ("openai/gsm8k", "72", "it is 72", 0.0),
    ("openai/gsm8k", "72", "#### 72" + " and so on" * 40, 0.0),
    ("openai/gsm8k", "1234", "#### 1,234", 1.0),
    ("HuggingFaceH4/MATH-500", "\\frac{1}{2}", "thus \\boxed{\\frac12}", 1.0),
    ("lighteval/MATH", "5", "thus \\boxed{6}", 0.0),
    ("math_dapo", "34", "Answer: 34", 1.0),
    ("math_dapo", "34", "Answer: 35", -1.0),
    ("aime_2024", "204", "Answer: 204", 1.0),
    ("searchR1_nq", {"target": ["Paris"]}, "<answer>Paris</answer>", 1.0),
    ("searchR1_nq", {"target": ["Paris"]}, "<answer>Rome</answer>", 0.0),
    ("taco", CODE, ADDS, 1.0),
    ("codecontests", CODE, ADDS.replace("a + b", "3"), 0.5),
    ("apps", CALLED, "```python\ndef add(a, b):\n    print('noise')\n    return a + b\n```", 1.0),
    ("apps", CALLED, "```python\nclass Solution:\n    def add(self, a, b):\n        return a - b\n```", 0.0),
    ("taco", CODE, "```python\nwhile True: pass\n```", 0.0),
    ("taco", CODE, "```python\nimport os\nos._exit(0)\n```", 0.0),
    ("taco", CODE, FRAMES, 0.0),
    ("taco", CODE, FILES, 0.0),
]


def row(number, source, truth):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"question {number}"}],
        "ability": "any",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": number, **({"only_here": {"a": 1}} if number == 0 else {})},
    }


def test_every_bundled_reward_gives_what_it_gives_in_verl(tmp_path):
    rows = [row(number, source, truth) for number, (source, truth, _, _) in enumerate(CASES)] + [row(99, "openai/gsm8k", "1")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    tasks = environment(f"verl/{path}@0.9.1", len(CASES), 1)
    by_prompt = {task.prompt: task for split in tasks.splits.values() for task in split}
    wanted = [(by_prompt[f"question {number}"], answer) for number, (_, _, answer, _) in enumerate(CASES)]
    verdicts = graded(tasks, wanted)
    assert [verdict.reward for verdict in verdicts] == [reward for _, _, _, reward in CASES]
    assert all(isinstance(verdict, Graded) for verdict in verdicts)


def test_an_unknown_source_is_a_failure_and_no_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row(number, "nobody/knows", "1")) + "\n" for number in range(2)))
    tasks = environment(f"verl/{path}@0.9.1")
    (verdict,) = graded(tasks, [(tasks.splits["train"][0], "1")])
    assert "NotImplementedError: Reward function is not implemented" in verdict.reason


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """Two files as verl's own scripts write them: every row has the keys of all, as null."""
    script = (
        "import json, sys, pyarrow, pyarrow.parquet\n"
        "for name, rows in json.load(sys.stdin).items():\n"
        "    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)\n"
    )
    files = {
        "train.parquet": [row(number, "openai/gsm8k", str(number)) for number in range(12)],
        "test.parquet": [row(number, "openai/gsm8k", str(number)) for number in range(20, 24)],
        "missing.parquet": [{key: value for key, value in row(0, "openai/gsm8k", "1").items() if key != "reward_model"}],
    }

    async def main():
        installed = await install(Package(requirements=(NUMPY, PYARROW)))
        async with await Sandbox.create.aio(image=installed.record.image) as sandbox:
            done = await sandbox.run.aio(PYTHON, "-c", script, stdin=json.dumps(files).encode(), timeout=120)
            assert done.exit_code == 0, done.stderr
            found = {name: await sandbox.read.aio(name) for name in files}
        installed.use.release()
        return found

    folder = tmp_path_factory.mktemp("parquet")
    for name, data in asyncio.run(main()).items():
        (folder / name).write_bytes(data)
    return folder


def test_parquet_files_are_read_and_held_out_as_they_are(parquet):
    tasks = environment(f"verl/{parquet}/train.parquet@0.9.1", 5, 3, heldOut=f"{parquet}/test.parquet")
    held_out = tasks.splits["heldout"]
    assert {task.prompt for task in held_out} <= {f"question {number}" for number in range(20, 24)}
    extra = [json.loads(bytes(tasks.row(task)))["extra_info"] for task in held_out]
    assert all(set(one) == {"split", "index"} for one in extra)
    verdicts = graded(tasks, [(task, tasks.expected_answer(task)) for split in tasks.splits.values() for task in split])
    assert verdicts == [Graded(reward=1.0, passed=True)] * 8


def test_a_missing_column_is_named_by_file_and_row(parquet):
    with pytest.raises(Exception, match=r"missing.parquet, row 0: column 'reward_model' is missing"):
        environment(f"verl/{parquet}/missing.parquet@0.9.1")


def test_looking_for_the_outputs_works_where_the_program_runs_in_the_graders_process():
    script = (
        "import os, sys, types, importlib, json\n"
        "import importlib.metadata as m\n"
        "where = str(m.distribution('verl').locate_file('verl'))\n"
        "for name, path in (('verl', where), ('verl.utils', where + '/utils')):\n"
        "    sys.modules[name] = module = types.ModuleType(name)\n"
        "    module.__path__ = [path]\n"
        "grade = importlib.import_module('verl.utils.reward_score').default_compute_score\n"
        "code, truth = json.load(sys.stdin)\n"
        "print('score', grade('taco', code, truth))\n"
    )

    async def main():
        installed = await install(Package(requirements=(NUMPY,), bare=("verl==0.9.1",)))
        async with await Sandbox.create.aio(image=installed.record.image) as sandbox:
            done = await sandbox.run.aio(PYTHON, "-c", script, stdin=json.dumps([FRAMES, CODE]).encode(), timeout=120, merge_stderr=True)
        installed.use.release()
        return done.stdout.decode()

    assert asyncio.run(main()).strip().endswith("score 1.0")
