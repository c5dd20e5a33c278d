"""The client that has the engine, behind the front of an LLM."""

from llamabatch.client.base import EngineClient
from llamabatch.client.front_client import FrontClient


def innermost(llm) -> EngineClient:
    client = llm._client
    return client.inner if isinstance(client, FrontClient) else client
