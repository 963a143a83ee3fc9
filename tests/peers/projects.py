"""Projects of the tests' own, written as their formats' users write them."""

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"

[tool.setuptools]
packages = [{modules}]
"""


def write(folder, name, source, **more):
    """A project of one module, and of `more`. What is installed of it is found by its content, wherever it is written."""
    modules = {name.replace("-", "_"): source, **more}
    place = folder / name
    for module, text in modules.items():
        (place / module).mkdir(parents=True)
        (place / module / "__init__.py").write_text(text)
    (place / "pyproject.toml").write_text(PYPROJECT.format(name=name, modules=", ".join(f'"{one}"' for one in modules)))
    return place
