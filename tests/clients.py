"""The client that has the engine, behind those of an LLM that count requests or take answers apart."""

from llamabatch.client.base import EngineClient
from llamabatch.client.middleware import PassingClient


def innermost(llm) -> EngineClient:
    client = llm._client
    while isinstance(client, PassingClient):
        client = client.inner
    return client
