"""Checks the workflow for a public host of the repository with actionlint."""
