"""The workflow for a public host of the repository, checked by actionlint."""
