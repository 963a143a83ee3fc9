"""Rows of SWE-bench: repositories with an issue, and the tests that its fix must pass."""

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.swebench.environment import SweBenchEnvironment


def load(place: str, section: EnvironmentSection) -> SweBenchEnvironment:
    """The environment of what lies at `place`. Raises ConfigError."""
    return SweBenchEnvironment(place, section)


__all__ = ["SweBenchEnvironment", "load"]
