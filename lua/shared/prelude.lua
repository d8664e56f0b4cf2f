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
local function write_strings(now, ttl_ms, values, ends, has_msetex)
  local names, call, batches = KEYS, redis.call
  -- The last expiry, as text, and as the longest time in microseconds for which it is the one.
  local expiry, longest = nil, 0
  for key = 1, #names do
    local fresh = ends[key]
    if fresh then
      local ttl = fresh - now
      if ttl > longest or ttl * 2 <= longest then
        local _, class = math.frexp(ttl_ms(fresh))
        expiry, longest = string.format('%d', 2 ^ class), 2 ^ class * 1000
      end
      if has_msetex then
        -- One command for all that expire at the same time.
        batches = batches or {}
        local batch = batches[expiry] or {}
        batches[expiry] = batch
        batch[#batch + 1] = names[key]
        batch[#batch + 1] = values[key]
      else
        call('SET', names[key], values[key], 'PX', expiry)
      end
    end
  end
  if not batches then return end
  for text, batch in pairs(batches) do
    local count = #batch / 2
    batch[#batch + 1] = 'PX'
    batch[#batch + 1] = text
    call('MSETEX', count, _G.unpack(batch))
  end
end
