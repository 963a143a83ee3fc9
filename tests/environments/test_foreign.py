"""Modules and data sets of other formats as environments: tasks, verdicts, and one sentence for what is wrong with them."""

import asyncio
import io
import json
import tarfile

import pytest

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import foreign, registry
from sandmill.environments.check import Status, check, failing
from sandmill.environments.environment import Environment
from sandmill.environments.grading import grade_episode
from sandmill.environments.task import AgentLimited, Boundary, Graded, InfrastructureFailure, Limit, NoAnswer, Submission
from sandmill.errors import ConfigError, EnvironmentFailed, UnknownEnvironment

SUMS = """
SPLITS = ("train", "heldout")

def tasks(split, top=20):
    start = 0 if split == "train" else 100
    for n in range(start, start + top):
        yield {"prompt": f"{n}+1?", "answer": str(n + 1), "metadata": {"n": n}}

def reward(completion, answer):
    if completion == "nothing":
        return None
    if completion == "raise":
        raise ValueError("odd")
    if completion == "parts":
        return {"reward": 0.5, "parts": {"close": 1}}
    return completion.strip() == answer
"""


pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def module(tmp_path):
    """Writes a module, returns its reference."""

    def write(source=SUMS, name="sums.py"):
        path = tmp_path / name
        path.write_text(source)
        return f"python/{path}"

    return write


def get(reference, train=3, held_out=2, **options):
    return registry.get(reference, EnvironmentSection(name=reference, train_tasks=train, held_out_tasks=held_out, options=options))


def graded(environment, answers, limit=None):
    """Verdicts on the first training task."""

    async def main():
        task = environment.splits["train"][0]
        try:
            return [
                await grade_episode(
                    environment, task, Submission(answer=environment.expected_answer(task) if one == "right" else one, limit=limit), None
                )
                for one in answers
            ]
        finally:
            await environment.close()
            await environment.close()

    return asyncio.run(main())


def test_a_module_is_an_environment(module):
    environment = get(module())
    checked: Environment = environment
    assert (checked.name, checked.version) == ("python/sums", "0")
    assert {name: len(tasks) for name, tasks in checked.splits.items()} == {"train": 3, "heldout": 2}
    verdicts = graded(environment, ["right", "wrong", None, "nothing", "parts"])
    assert verdicts == [
        Graded(reward=1.0, passed=True),
        Graded(reward=0.0, passed=False),
        NoAnswer(reward=0.0),
        NoAnswer(reward=0.0),
        Graded(reward=0.5, passed=False, parts={"close": 1.0}),
    ]


def test_nothing_of_an_answer_is_in_a_task(module):
    environment = get(module(SUMS.replace("str(n + 1)", "'secret' + str(n)")))
    assert "secret" not in repr(environment.splits)
    graded(environment, [])


def test_a_limited_episode_is_graded_on_what_it_left(module):
    assert graded(get(module()), [None], limit=Limit.TOKENS) == [AgentLimited(limit=Limit.TOKENS, reward=0.0, passed=False)]


def test_pass_at_decides_what_passes(module):
    assert graded(get(module(), passAt=0.5), ["parts"]) == [Graded(reward=0.5, passed=True, parts={"close": 1.0})]


def test_a_grader_that_raises_is_a_failure_and_the_next_one_is_graded(module):
    failed, after = graded(get(module()), ["raise", "right"])
    assert failed == InfrastructureFailure(boundary=Boundary.GRADER, reason="ValueError: odd (sums.py, line 13)", retryable=False)
    assert after == Graded(reward=1.0, passed=True)


def test_a_package_that_is_lost_is_started_again(module):
    environment = get(
        module(
            SUMS.replace("SPLITS", "import time\nSPLITS", 1).replace(
                '"raise":', '"wait":\n        time.sleep(60)\n    if completion == "raise":', 1
            )
        )
    )

    async def main():
        task = environment.splits["train"][0]
        waiting = asyncio.ensure_future(grade_episode(environment, task, Submission(answer="wait"), None, timeout_s=60))
        await asyncio.sleep(0.5)
        worker = await environment.service.worker()
        await worker._process.kill.aio()
        try:
            return await waiting, await grade_episode(environment, task, Submission(answer=environment.expected_answer(task)), None)
        finally:
            await environment.close()

    lost, after = asyncio.run(main())
    assert lost == InfrastructureFailure(
        boundary=Boundary.GRADER, reason="the package's process is gone: signal 9 ended it", retryable=True
    )
    assert after == Graded(reward=1.0, passed=True)


def test_a_person_may_say_what_passes_whatever_the_package_says(module):
    source = SUMS.replace('"parts": {"close": 1}', '"passed": True')
    assert graded(get(module(source)), ["parts"]) == [Graded(reward=0.5, passed=True)]
    assert graded(get(module(source), passAt=0.6), ["parts"]) == [Graded(reward=0.5, passed=False)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('requires-python = ">=3.99"', r"sums.py: it needs Python >=3.99 and would run under 3\.\d+\.\d+: name another by option python"),
        ('requires-python = "new"', "sums.py: requires-python in its .* block is 'new', not such as"),
        ('dependencies = ["sympy"]', "sums.py: dependencies: 'sympy' leaves the version open"),
    ],
)
def test_what_a_modules_head_asks_for_is_read_without_running_it(module, line, said):
    with pytest.raises(ConfigError, match=said):
        get(module(f"# /// script\n# {line}\n# ///\n{SUMS}"))


def test_arguments_reach_the_module(module):
    environment = get(module(), 15, 2, top=15)
    assert len(environment.splits["train"]) == 15
    graded(environment, [])


def test_the_digest_is_that_of_tasks_and_grader(module, tmp_path):
    environments = [get(module()), get(module()), get(module(), 4), get(module(SUMS + "\n# changed\n"))]
    first, same, larger, changed = (one.digest for one in environments)
    assert first == same
    assert len({first, larger, changed}) == 3
    for environment in environments:
        graded(environment, [])


def bundle(folder, files):
    path = folder / "bundle.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text.encode()), 0o600
            archive.addfile(info, io.BytesIO(text.encode()))
    return f"python/{path}"


def test_a_bundle_brings_its_packages(tmp_path):
    files = {
        "task_set.py": "import helper\n" + SUMS.replace("str(n + 1)", "str(helper.add(n, 1))"),
        "site/helper.py": "def add(a, b): return a + b\n",
    }
    environment = get(bundle(tmp_path, files), module="task_set")
    assert environment.name == "python/bundle"
    assert graded(environment, ["right", "wrong"]) == [Graded(reward=1.0, passed=True), Graded(reward=0.0, passed=False)]


@pytest.mark.parametrize(
    ("files", "said"), [({"other.py": ""}, "no module 'environment' at its top; it has other.py"), ({}, "it has none")]
)
def test_a_bundle_without_its_module_says_what_it_has(tmp_path, files, said):
    with pytest.raises(EnvironmentFailed, match=said):
        get(bundle(tmp_path, files))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("x =", r"SyntaxError: invalid syntax \(sums.py, line 1\)$"),
        ("def tasks(split): return []", r"AttributeError: sums.py has no function reward\(\)"),
        ("def reward(c, a): pass\ndef tasks(split): return [{'prompt': 'x'}]", r"row 0: field 'answer' is missing; it has prompt"),
        ("def reward(c, a): pass\ndef tasks(split): return [{'prompt': 1, 'answer': 2}]", "row 0: field 'prompt' is a int"),
        ("def reward(c, a): pass\ndef tasks(split): return [{'prompt': 'x', 'answer': 2, 'anwser': 1}]", "there is no field 'anwser'"),
        ("def reward(c, a): pass\ndef tasks(split): return [1]", r"sums.py, tasks\('train'\), row 0 is a int, not a mapping"),
        (
            "def reward(c, a): pass\ndef tasks(split): return [{'prompt': 'x', 'answer': {'at': object()}}]",
            r"split 'heldout', row 0: field 'row'.answer.at holds <object",
        ),
        ("import os\nos._exit(4)", "it ended with exit code 4"),
        ("print('x' * 10_000_000)\nimport sys\nsys.exit(0)", r"it called exit\(0\)"),
    ],
)
def test_a_module_that_does_not_load_says_why(module, source, said):
    with pytest.raises(EnvironmentFailed, match=said):
        get(module(source))


@pytest.mark.parametrize(
    ("reference", "options", "kind", "said"),
    [
        ("python/nowhere.py", {}, UnknownEnvironment, "there is no file nowhere.py"),
        ("reasoning-gym/chain_sum", {}, UnknownEnvironment, r"needs a version: write reasoning-gym/chain_sum@0.1.25"),
        ("reasoning-gym/@0.1.25", {}, UnknownEnvironment, "is not a reference"),
        ("verl/data.csv@0.9.1", {}, ConfigError, "those end in .parquet, .json, .jsonl"),
        ("verl/nowhere.parquet@0.9.1", {}, UnknownEnvironment, "there is no file nowhere.parquet"),
        ("verl/data.parquet@0.9.1", {"rewrd": "x"}, ConfigError, r"spec.environment.options.rewrd: .*did you mean 'reward'\?"),
        ("reasoning-gym/x@1", {"requirements": ["sympy"]}, ConfigError, "leaves the version open; pin it: sympy==VERSION"),
        ("reasoning-gym/x@1", {"requirements": ["--index-url=http://evil"]}, ConfigError, "is no requirement"),
        ("reasoning-gym/x@1", {"requirements": ["a @ https://evil/a.whl"]}, ConfigError, "names a URL"),
        ("reasoning-gym/x@1", {"requirements": "sympy==1"}, ConfigError, "options.requirements: Expected `array`"),
        ("reasoning-gym/x@1", {"memory": "lots"}, ConfigError, "options.memory"),
        ("reasoning-gym/x@1", {"python": "three"}, ConfigError, "a Python is written as 3.11"),
        ("verifiers/some@1.0", {"verifiers": "0.4.0"}, ConfigError, "verifiers 0.1.x"),
    ],
)
def test_what_a_person_wrote_wrong_is_one_sentence(reference, options, kind, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.parquet").write_bytes(b"")
    with pytest.raises(kind, match=said):
        get(reference, **options)


def verl_file(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return f"verl/{path}"


def verl_row(number, **changes):
    found = {
        "data_source": "own/sums",
        "prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"{number}+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "missing": None, "nested": {"gone": None, "here": 1}},
    }
    return {**found, **changes}


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "own/sums" and "missing" not in extra_info and extra_info["nested"] == {"here": 1}, extra_info
    if solution_str == "text":
        return "1.0"
    if solution_str == "mapping":
        return {"score": 0.5, "acc": True, "pred": "3"}
    return 1.0 if solution_str == ground_truth else -1.0
"""


def test_a_data_set_of_verl_with_a_reward_of_ones_own(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    environment = get(verl_file(tmp_path, [verl_row(n) for n in range(9)]), reward=str(tmp_path / "reward.py"))
    task = environment.splits["train"][0]
    assert task.prompt.startswith("Be short.\n\n")
    truth = str(json.loads(bytes(environment.row(task)))["ground_truth"])
    text = InfrastructureFailure(boundary=Boundary.GRADER, reason="the reward is '1.0' (str), not a finite number", retryable=False)
    assert graded(environment, [truth, "wrong", "mapping", "text"]) == [
        Graded(reward=1.0, passed=True),
        Graded(reward=-1.0, passed=False),
        Graded(reward=0.5, passed=False, parts={"acc": 1.0}),
        text,
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({k: v for k, v in verl_row(1).items() if k != "prompt"}, "row 1: column 'prompt' is missing"),
        (
            {("reward_modle" if k == "reward_model" else k): v for k, v in verl_row(1).items()},
            "column 'reward_model' is missing, or is it 'reward_modle'",
        ),
        (verl_row(1, prompt="text"), "row 1: column 'prompt' is a str, not a list of messages"),
        (verl_row(1, prompt=[{"role": "user", "content": ["image"]}]), "row 1: column 'prompt' holds"),
        (verl_row(1, reward_model={"style": "rule"}), "row 1: column 'reward_model' has no ground_truth"),
        (verl_row(1, extra_info=[1]), "row 1: column 'extra_info' is a list"),
        (verl_row(1, prompt=None), "row 1: column 'prompt' is None"),
        (verl_row(1, images=[{"bytes": ""}]), "row 1: column 'images' is not empty, and a policy here is given text only"),
        ([1], "row 1 is no mapping of columns to values"),
    ],
)
def test_a_broken_row_of_verl_is_named_by_file_row_and_column(tmp_path, row, said):
    (tmp_path / "reward.py").write_text(REWARD)
    with pytest.raises(EnvironmentFailed, match=f"rows.jsonl, {said}" if said.startswith("row") else said):
        get(verl_file(tmp_path, [verl_row(0), row]), reward=str(tmp_path / "reward.py"))


def test_a_line_that_is_no_json_is_named_by_file_and_line(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    reference = verl_file(tmp_path, [verl_row(0)])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('\n{"a": \n')
    with pytest.raises(EnvironmentFailed, match=r"rows.jsonl cannot be read: line 3, column \d+: Expecting value"):
        get(reference, reward=str(tmp_path / "reward.py"))


BATCHED = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    scores = [float(said == str(truth)) + bonus for said, truth in zip(solution_strs, ground_truths)]
    return scores if solution_strs != ["two"] else [*scores, 1.0]
"""


def test_a_reward_for_batches_gets_one_reply_and_its_own_arguments(tmp_path):
    (tmp_path / "reward.py").write_text(BATCHED)
    reference = verl_file(tmp_path, [verl_row(n) for n in range(9)])
    environment = get(reference, reward=str(tmp_path / "reward.py"), bonus=0.25)
    truth = str(json.loads(bytes(environment.row(environment.splits["train"][0])))["ground_truth"])
    right, wrong, two = graded(environment, [truth, "wrong", "two"])
    assert (right.reward, wrong.reward) == (1.25, 0.25)
    assert "for a batch of one, not a list with its score" in two.reason
    with pytest.raises(EnvironmentFailed, match=r"compute_score\(\) takes no 'bonnus'; it takes data_sources"):
        get(reference, reward=str(tmp_path / "reward.py"), bonnus=0.25)


def test_a_reward_function_that_is_not_there_is_named(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    with pytest.raises(EnvironmentFailed, match=r"reward.py has no function 'compute_scores'; did you mean 'compute_score'\?"):
        get(verl_file(tmp_path, [verl_row(n) for n in range(9)]), reward=f"{tmp_path}/reward.py:compute_scores")


def checked(environment, **options):
    """What a check of the training tasks came to, by status and reason."""

    async def main():
        try:
            return await check(environment, environment.splits["train"], **options)
        finally:
            await environment.close()

    return [(one.status, one.reason) for one in asyncio.run(main()).values()]


def test_a_sound_module_passes_its_check_and_an_unsound_one_says_why(module, monkeypatch, tmp_path):
    monkeypatch.setattr("sandmill.environments.check.state_root", lambda: tmp_path)
    assert checked(get(module()), times=2) == [(Status.SOUND, "")] * 3
    found = {}
    for name, body in {
        "yes": "return True",
        "no": "return False",
        "moods": "import time\n    return 1 + time.time() if completion == answer else 0",
        "breaks": "raise OSError('gone')",
    }.items():
        source = SUMS[: SUMS.index("def reward")] + f"def reward(completion, answer):\n    {body}\n"
        [(found[name], _)] = checked(get(module(source, f"{name}.py"), 1, 1), times=2)
    assert found == {"yes": Status.FORGEABLE, "no": Status.BROKEN, "moods": Status.FLAKY, "breaks": Status.BROKEN}


def test_a_task_is_the_same_however_many_are_drawn_and_another_once_its_grader_is(module, monkeypatch, tmp_path):
    monkeypatch.setattr("sandmill.environments.check.state_root", lambda: tmp_path / "state")
    yes = SUMS[: SUMS.index("def reward")] + "def reward(completion, answer):\n    return True\n"
    checked(get(module(yes), 20, 1))
    refused, mended = get(module(yes), 2, 9), get(module(), 2, 9)
    assert set(failing(refused, refused.splits["train"])) == {task.id for task in refused.splits["train"]}
    assert failing(mended, mended.splits["train"]) == {}
    for environment in (refused, mended):
        asyncio.run(environment.close())


def test_loading_says_what_it_does(module):
    said = []
    reference = module()
    environment = foreign.load(reference, EnvironmentSection(name=reference, train_tasks=1, held_out_tasks=1), said.append)
    graded(environment, [])
    assert said == ["loading python/sums"]
