"""An MCP server on stdin and stdout with one tool, named look: python mcp_server.py NAME."""

import json
import sys

name = sys.argv[1]
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method = asked["method"]
    if method == "initialize":
        version = asked["params"]["protocolVersion"]
        result = {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": name, "version": "1"},
        }
    elif method == "tools/list":
        schema = {"type": "object", "properties": {}}
        result = {"tools": [{"name": "look", "description": f"Looks {name}.", "inputSchema": schema}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": f"seen {name}"}]}
    else:
        result = {}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
