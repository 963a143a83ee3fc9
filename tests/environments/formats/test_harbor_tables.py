"""task.toml: every table and key of the format is read, anything else is refused with file, field and the nearest name."""

import pytest

from sandmill.environments.formats.harbor.tables import read_task_file
from sandmill.errors import ConfigError

WHOLE = """
schema_version = "1.4"
source = "somewhere"
artifacts = ["/app/out.txt", {source = "/app/logs", destination = "/logs/artifacts", exclude = ["*.tmp"]}]
multi_step_reward_strategy = "final"
[task]
name = "own/whole"
authors = [{name = "A", email = "a@example.org"}]
keywords = ["x"]
[metadata]
anything = {goes = 1979-05-27}
[agent]
timeout_sec = 12.5
[verifier]
timeout_sec = 60
env = {KEY = "${SOME_KEY}", OTHER = "${UNSET_KEY:-fallback}", PLAIN = "a ${SOME_KEY}"}
[[verifier.collect]]
command = "date"
[environment]
docker_image = "an/image:1"
cpus = 2
memory_mb = 2048
storage_mb = 10240
network_mode = "allowlist"
allowed_hosts = ["pypi.org"]
workdir = "/app"
healthcheck = {command = "true", retries = 2}
[solution]
env = {A = "b"}
[[steps]]
name = "first"
min_reward = 0.5
[[steps]]
name = "second"
min_reward = {correctness = 1}
"""


def read(tmp_path, text, host=None):
    path = tmp_path / "task.toml"
    path.write_text(text)
    return read_task_file(path, {} if host is None else host)


def test_the_whole_format_is_read(tmp_path):
    found = read(tmp_path, WHOLE, {"SOME_KEY": "from the host"})
    assert [artifact.source for artifact in found.artifacts] == ["/app/out.txt", "/app/logs"]
    assert found.verifier.env == {"KEY": "from the host", "OTHER": "fallback", "PLAIN": "a ${SOME_KEY}"}
    assert (found.environment.memory_mb, found.environment.cpus, found.environment.healthcheck.retries) == (2048, 2.0, 2)
    assert [step.min_reward for step in found.steps] == [{"reward": 0.5}, {"correctness": 1.0}]
    assert (found.agent.timeout_sec, found.verifier.collect[0].service) == (12.5, "main")


def test_older_spellings_mean_what_they_became(tmp_path):
    found = read(tmp_path, 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512MB"\nallow_internet = false\n')
    assert (found.schema_version, found.environment.memory_mb, found.environment.storage_mb) == ("1.0", 2048, 512)
    assert found.environment.network_mode == "no-network"


def test_an_empty_file_is_all_defaults(tmp_path):
    assert read(tmp_path, "").verifier.timeout_sec == 600.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[verifer]\ntimeout_sec = 1\n", "verifer: unknown key 'verifer'; did you mean 'verifier'?"),
        ("[verifier]\ntimeout = 1\n", "verifier.timeout: unknown key 'timeout'; did you mean 'timeout_sec'?"),
        ("[environment]\nmemory_gb = 1\n", "environment.memory_gb: unknown key 'memory_gb'; did you mean 'memory_mb'?"),
        ("[verifier]\ntimeout_sec = 'long'\n", "verifier.timeout_sec: expected a finite number above 0"),
        ("[verifier]\ntimeout_sec = 0\n", "verifier.timeout_sec: expected a finite number above 0"),
        ("[verifier]\nenv = {KEY = '${UNSET_KEY}'}\n", "verifier.env.KEY: the variable UNSET_KEY is not set on this machine"),
        (
            "[verifier.environment]\nenv = {KEY = '${UNSET_KEY}'}\n",
            "verifier.environment.env.KEY: the variable UNSET_KEY is not set on this machine",
        ),
        (
            "[[steps]]\nname = 'a'\n[steps.verifier.environment]\nenv = {KEY = '${UNSET_KEY}'}\n",
            "steps[0].verifier.environment.env.KEY: the variable UNSET_KEY is not set on this machine",
        ),
        (
            "[verifier]\nenvironment_mode = 'separated'\n",
            "verifier.environment_mode: it is one of shared, separate, not 'separated'; did you",
        ),
        ("multi_step_reward_strategy = 'min'\n", "it is one of mean, final"),
        ("schema_version = '9.0'\n", "schema_version: it is one of"),
        ("[environment]\ngpus = 1\n", "environment.gpus: the task asks for an accelerator"),
        ("[environment]\nmcp_servers = [{name = 'x'}]\n", "environment.mcp_servers: the task's MCP servers cannot be started here"),
        ("[[steps]]\nname = '../up'\n", "steps.name: '../up' is no name of a folder below steps/"),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'a'\n", "steps.name: step 'a' is named twice"),
        ("[[steps]]\nmin_reward = 1\n", "the key 'name' is missing"),
        ("artifacts = [3]\n", "expected a mapping"),
        ("= 1\n", "it is no TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'task.toml'}: ")
    assert "\n" not in str(caught.value)
