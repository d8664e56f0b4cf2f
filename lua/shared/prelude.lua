-- Numbers are doubles: whatever is computed here stays below 2^53, where they are exact. The quotas'
-- constructors see to that. So `floor(a / b)` and `ceil(a / b)` are exact too: a quotient that is no
-- whole number is at least `1 / b` away from one, and rounding moves it by less.
--
-- What is dear in Lua is to make things: a table costs more than all the arithmetic of a decision, and
-- so does a function. So states are kept in arrays by the index of their identity, one for each
-- number, and what most calls do not need is made by a function where it is needed.
-- For the same reason only the busiest functions of the library have names of their own here: a
-- variable that functions share is a thing, too.
local pack, unpack, call = struct.pack, struct.unpack, redis.call

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
  return math.max(math.ceil((until_us - now) / 1000), 1) + spare_ms
end

-- An instant in a record takes seven bytes, of which the highest three bits are free: they hold the
-- code that says what kind of record it is (identity.lua). It is read and written in two parts, since
-- the whole would not be exact.
local LOW = 2 ^ 48
