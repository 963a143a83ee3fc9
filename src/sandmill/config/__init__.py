"""What a person may configure: the manifest's types (`manifest`) and reading it from YAML with file, line and field (`load`)."""
