"""Task folders of Harbor and Terminal-Bench."""

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.harbor.environment import HarborEnvironment


def load(place: str, section: EnvironmentSection) -> HarborEnvironment:
    """The environment of what lies at `place`. Raises ConfigError."""
    return HarborEnvironment(place, section)


__all__ = ["HarborEnvironment", "load"]
