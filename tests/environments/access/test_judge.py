"""A grader asks a judge through the broker: it never holds the key, and no failure of the judge becomes a number."""

from judge_server import KEY

from sandmill.environments.task import Boundary, Graded, InfrastructureFailure


def test_a_grader_asks_a_judge_and_its_verdict_stands(judge, allowed, graded):
    [(verdict, meter)] = graded("return judged(completion)", ["yes"], allowed())
    assert verdict == Graded(reward=1.0, passed=True)
    assert judge.heard[0]["model"] == "real-judge"
    assert judge.keys == [f"Bearer {KEY}"]
    [call] = meter.calls
    assert (call.judge, call.outcome, call.tokens_in, call.tokens_out, call.cost_microusd) == ("judge-1", "answered", 20, 3, 26)
    assert call.seconds > 0
