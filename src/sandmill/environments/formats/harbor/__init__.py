"""Task folders of Harbor and Terminal-Bench."""

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.harbor.environment import HarborEnvironment
from sandmill.environments.packages.install import Report


def load(place: str, section: EnvironmentSection, report: Report) -> HarborEnvironment:
    """The tasks in a folder, which installs nothing. Raises ConfigError."""
    return HarborEnvironment(place, section)


__all__ = ["HarborEnvironment", "load"]
