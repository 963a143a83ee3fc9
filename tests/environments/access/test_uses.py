"""A module says what its graders cannot do without; it is not loaded, let alone sampled for, until a manifest gives it."""

import pytest

from sandmill.environments import registry
from sandmill.environments.access.access import NOTHING
from sandmill.environments.task import Graded
from sandmill.errors import ConfigError


@pytest.mark.parametrize(
    ("uses", "field", "said"),
    [
        ("['judge']", "spec.grading.judge", "use judge, which they are not given"),
        ("['network']", "spec.grading.network", "use network,"),
        ("['mcp:abacus']", "spec.grading.mcp", "use mcp:abacus,"),
        ("['j\\x1b[2J']", "spec.grading.judge", "use j\\x1b[2J,"),
    ],
)
def test_what_is_lacking_is_named(graded, uses, field, said):
    with pytest.raises(ConfigError) as caught:
        graded("return 1.0", ["x"], NOTHING, module=f"USES = {uses}")
    assert caught.value.field == field
    assert said in caught.value.message


def test_what_is_given_is_enough(allowed, graded):
    [(verdict, _)] = graded("return judged('yes')", ["x"], allowed(), module="USES = ['judge', 'judge:judge-1']")
    assert verdict == Graded(reward=1.0, passed=True)
    with pytest.raises(ConfigError, match="use judge:judge-2"):
        graded("return judged('yes')", ["x"], allowed(), module="USES = ['judge:judge-2']")


def test_a_grader_outside_a_package_cannot_be_given_anything(allowed):
    with pytest.raises(ConfigError, match=r"graders of shell@1\.0\.0 do not run in a package's sandbox"):
        registry.get("shell@1.0.0", None, access=allowed())
