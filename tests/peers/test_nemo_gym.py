"""NeMo Gym's resources servers give the rewards that were recorded with them, and play with their tools.

Installs nemo-gym 0.7.0 (its wheel alone: it asks for Python 3.13.14 and runs on 3.11) and, in the same environment, what the servers below
import: about 700 MB.
"""

import asyncio
import json

import pytest
from dialogues import said

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import foreign, registry
from sandmill.environments.formats import plan
from sandmill.environments.packages.install import install
from sandmill.environments.packages.loaded import LoadedPackage

REQUIREMENTS = [
    "defusedxml==0.7.1",
    "immutabledict==4.3.1",
    "langdetect==1.0.9",
    "nltk==3.10.3",
    "pillow==12.3.0",
    "reasoning-gym==0.1.25",
    "rouge-score==0.1.2",
    "toml==0.10.2",
    "tqdm==4.70.1",
    "xmltodict==1.0.2",
]
SERVERS = (
    "arc_agi",
    "bunsenbench_chemistry_mcq",
    "calendar",
    "circle_click",
    "cvdp",
    "equivalence_rule",
    "example_multi_step",
    "example_single_tool_call",
    "example_tool_call_multireward",
    "format_verification",
    "generative_reward_model",
    "gpqa_diamond",
    "graphwalks",
    "hotpotqa_qa",
    "iheval",
    "imo_gradingbench",
    "litmus_agent",
    "math_proof_judgement",
    "nvarc",
    "proof_genselect",
    "ragtruth",
    "reasoning_gym",
    "scicode",
    "scicodepile",
    "spartqa",
    "string_match",
    "structeval",
    "swe_pivot",
    "swerl_llm_judge",
    "xlam_fc",
)


def section(server, **more):
    return EnvironmentSection(
        name=f"nemo-gym/{server}@0.7.0", train_tasks=3, held_out_tasks=2, options={"requirements": REQUIREMENTS, **more}
    )


@pytest.mark.parametrize("server", SERVERS)
def test_recorded_rewards_are_given_again(server):
    async def replayed():
        asked = section(server)
        planned = plan(asked.name, asked)
        installed = await install(planned.package)
        package = await LoadedPackage.start(foreign._launch(planned, installed))
        try:
            return [json.loads(await package.once("replay", {"number": number}, timeout_s=120)) for number in range(5)]
        finally:
            await package.close()
            installed.use.release()

    found = asyncio.run(replayed())
    assert [one["reward"] for one in found] == [one["recorded"] for one in found]


def test_a_server_with_a_tool_is_played_and_its_refusals_go_to_the_model():
    asked = section("example_single_tool_call")
    environment = registry.get(asked.name, asked)

    async def main():
        right = await said(environment, ("get_weather", {"town": "Rome"}), ("get_weather", {"city": "Rome"}), "It is cold.")
        wrong = await said(environment, "It is cold.")
        await environment.close()
        return right, wrong

    (reactions, verdict), (_, without) = asyncio.run(main())
    assert [(one.ok, one.over) for one in reactions] == [(False, False), (True, False), (True, True)]
    assert "The weather in Rome is cold." in reactions[1].text
    assert (verdict.reward, without.reward) == (1.0, 0.0)


def test_a_server_that_keeps_state_scores_what_its_tools_were_told():
    asked = section("example_session_state_mgmt")
    environment = registry.get(asked.name, asked)
    row = json.loads(bytes(environment.row(environment.splits["train"][0])))
    tools = {tool.name for tool in environment.offer.tools}

    async def main():
        calls = [("increment_counter", {"count": row["expected_count"] - row["initial_count"]}), ("get_counter_value", {})]
        right = await said(environment, *calls, "done")
        wrong = await said(environment, "done")
        await environment.close()
        return right, wrong

    (reactions, verdict), (_, without) = asyncio.run(main())
    assert tools == {"increment_counter", "get_counter_value"}
    assert str(row["expected_count"]) in reactions[1].text
    assert (verdict.reward, without.reward) == (1.0, 0.0)
