-- Numbers are doubles: whatever is computed here stays below 2^53, where they are exact. The quotas'
-- constructors see to that. So `floor(a / b)` and `ceil(a / b)` are exact too: a quotient that is no
-- whole number is at least `1 / b` away from one, and rounding moves it by less.
--
-- What is dear in Lua is to make things: a table costs more than all the arithmetic of a decision, and
-- so does a function. So states are kept in arrays by the index of their identity, one for each
-- number, and what most calls do not need is made by a function where it is needed.
-- For the same reason only the busiest functions of the library have names of their own here: a
-- variable that functions share is a thing, too. Functions that every call needs are handed what they
-- use.
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

-- Writes strings under their keys. `ends` has the instants from which on they mean nothing; those
-- without one are left alone. A power of two of milliseconds is close enough an expiry: to be kept for
-- longer is harmless, since a state is judged by the instants in it.
local function write_strings(now, spare_ms, values, ends, has_msetex)
  local names, call = KEYS, redis.call
  -- The last expiry, as text, and as the longest time in microseconds for which it is the one; and the
  -- names and strings that are written with it by one command, if the server can do that.
  local expiry, longest, batch = nil, 0
  local batches = has_msetex and {}
  for key = 1, #names do
    local fresh = ends[key]
    if fresh then
      local ttl = fresh - now
      if ttl > longest or ttl * 2 <= longest then
        -- The server counts from the beginning of the present millisecond.
        local _, class = math.frexp(ttl / 1000 + 1 + spare_ms)
        expiry, longest = string.format('%d', 2 ^ class), 2 ^ class * 1000
        if batches then
          batch = batches[expiry] or { nil, nil, nil, nil }
          batches[expiry] = batch
        end
      end
      if batch then
        local size = #batch
        batch[size + 1], batch[size + 2] = names[key], values[key]
      else
        call('SET', names[key], values[key], 'PX', expiry)
      end
    end
  end
  if not batches then return end
  for text, all in pairs(batches) do
    local size = #all
    all[size + 1], all[size + 2] = 'PX', text
    call('MSETEX', size / 2, _G.unpack(all))
  end
end
