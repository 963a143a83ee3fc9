"""Projects of the tests' own, written as their formats' users write them."""

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"

[tool.setuptools]
packages = ["{module}"]
"""


def write(folder, name, source):
    """A project of one module. What is installed of it is found by its content, wherever it is written."""
    module = name.replace("-", "_")
    place = folder / name
    (place / module).mkdir(parents=True)
    (place / "pyproject.toml").write_text(PYPROJECT.format(name=name, module=module))
    (place / module / "__init__.py").write_text(source)
    return place
