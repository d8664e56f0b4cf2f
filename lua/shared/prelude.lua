-- Numbers are doubles: whatever is computed here stays below 2^53, where they are exact. The quotas'
-- constructors see to that. So `floor(a / b)` and `ceil(a / b)` are exact too: a quotient that is no
-- whole number is at least `1 / b` away from one, and rounding moves it by less.
local pack, unpack = struct.pack, struct.unpack
local unpack_list = _G.unpack
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
local sub, rep = string.sub, string.rep
local call = redis.call

-- The present in microseconds since the Unix epoch. Read once; only tests give another.
local now
-- How many milliseconds state outlives its use. Tests, whose time stands still, ask for more.
local spare_ms = 0
if ARGV[3] then
  now, spare_ms = tonumber(ARGV[3]), 3600000
else
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- How many milliseconds it is until an instant, rounded up.
local function ttl_ms(until_us)
  return max(ceil((until_us - now) / 1000), 1) + spare_ms
end

-- The length of what all records begin with (identity.lua).
local HEAD = 11
