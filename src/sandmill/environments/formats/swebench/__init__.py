"""Rows of SWE-bench: repositories with an issue, and the tests that its fix must pass."""

from sandmill.environments.formats.swebench.environment import SweBenchEnvironment

__all__ = ["SweBenchEnvironment"]
