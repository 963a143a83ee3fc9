"""Task folders of Harbor and Terminal-Bench."""

from sandmill.environments.formats.harbor.environment import HarborEnvironment

__all__ = ["HarborEnvironment"]
