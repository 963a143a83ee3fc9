"""The built-in shell family: generated folders and questions that need one to four bash commands."""

from sandmill.environments.builtin.shell.environment import ShellEnvironment
from sandmill.environments.builtin.shell.lexicon import vocabulary

__all__ = ["ShellEnvironment", "vocabulary"]
