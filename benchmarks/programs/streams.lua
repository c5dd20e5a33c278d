-- wrk: POSTs the bodies of a file, a line each and each once, and ends with the last answer.
-- wrk -t1 -d LIMIT -s streams.lua URL -- FILE
-- Prints "RESULT microseconds answered failed"; the time begins with the first request that is sent.
local ffi = require("ffi")
ffi.cdef [[ struct llamabatch_time { long s; long us; }; int gettimeofday(struct llamabatch_time *, void *); ]]

local NEVER_MS = 1000000
local bodies, let, sent, answered, failed = {}, 0, 0, 0, 0
local first_s

local function now_s()
  local time = ffi.new("struct llamabatch_time")
  ffi.C.gettimeofday(time, nil)
  return tonumber(time.s) + tonumber(time.us) / 1e6
end

function init(args)
  for line in io.lines(args[1]) do bodies[#bodies + 1] = line end
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
end

-- asked before each request of a connection: with none left, the connection rests
function delay()
  first_s = first_s or now_s()
  let = let + 1
  return let <= #bodies and 0 or NEVER_MS
end

-- wrk asks once before it begins, to look at the request
function request()
  if first_s then sent = sent + 1 end
  return wrk.format(nil, nil, nil, bodies[math.max(sent, 1)])
end

function response(status)
  answered = answered + 1
  if status ~= 200 then failed = failed + 1 end
  if answered == #bodies then
    io.write(string.format("\nRESULT %d %d %d\n", 1e6 * (now_s() - first_s), answered, failed))
    io.flush()
    os.exit(0)  -- wrk itself would go on to its limit of time
  end
end

function done(summary)
  local errors = summary.errors
  io.write(string.format("\nRESULT %d %d %d\n", summary.duration, summary.requests,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
