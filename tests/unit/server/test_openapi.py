"""The OpenAPI document: it has every route, and its examples work."""

import pytest
from starlette.routing import Route

from llamabatch.server.openapi import OPERATIONS, document
from tests.unit.server.serving_clients import ready_client

EXAMPLES = [(path, name, body) for path, operation in OPERATIONS.items() for name, body in operation.examples.items()]


@pytest.fixture(scope="module")
def client():
    with ready_client() as client:
        yield client


@pytest.mark.parametrize(("path", "name", "body"), EXAMPLES, ids=[f"{path} {name}" for path, name, _ in EXAMPLES])
def test_every_example_works(client, path, name, body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "x-llamabatch-ignored" not in response.headers


def test_every_route_is_in_the_document(client):
    made = client.get("/openapi.json").json()
    assert made["openapi"] == "3.1.0"
    routes = [route for route in client.app.routes if isinstance(route, Route) and route.include_in_schema]
    for route in routes:
        methods = {method.lower() for method in route.methods} - {"head"}
        assert methods <= made["paths"][route.path_format].keys()
    assert made["paths"].keys() == {route.path_format for route in routes}
    assert set(OPERATIONS) <= made["paths"].keys()
    names = [each["operationId"] for path in made["paths"].values() for each in path.values()]
    assert len(set(names)) == len(names)


def test_every_field_of_a_body_is_in_the_document(client):
    paths = client.get("/openapi.json").json()["paths"]
    for path, operation in OPERATIONS.items():
        schema = paths[path]["post"]["requestBody"]["content"][operation.kind]["schema"]
        assert schema["properties"].keys() == operation.fields.keys()
        assert set(operation.required) <= set(operation.fields)
    assert paths["/rerank"]["post"]["requestBody"] == paths["/v1/rerank"]["post"]["requestBody"], "of one endpoint"


def test_a_key_is_named_where_one_is_needed():
    assert "security" not in document([])
    assert document([], has_key=True)["security"] == [{"key": []}]


def test_behind_a_proxy_the_document_has_its_path():
    with ready_client(server={"root_path": "/llm"}) as client:
        made = client.get("/llm/openapi.json").json()
    assert made["servers"] == [{"url": "/llm"}]
    assert "/v1/models" in made["paths"]
