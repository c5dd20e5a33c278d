-- wrk: POSTs the bodies of a file, a line each, in turn. wrk -s streams.lua URL -- FILE
local bodies, at = {}, 0

function init(args)
  for line in io.lines(args[1]) do bodies[#bodies + 1] = line end
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
end

function request()
  at = at % #bodies + 1
  return wrk.format(nil, nil, nil, bodies[at])
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format("\nRESULT %d %d %d\n", summary.duration, summary.requests,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
