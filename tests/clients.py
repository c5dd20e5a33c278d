"""Finds the client that has the engine, behind an LLM's FrontClient."""

from llamabatch.client.base import EngineClient
from llamabatch.client.front_client import FrontClient


def innermost(llm) -> EngineClient:
    client = llm._client
    return client.inner if isinstance(client, FrontClient) else client
