-- The short way to decide. Most requests are about buckets of one identity, and most identities have
-- records of these and of no others, one after the other, as they were left. The store says whether a
-- batch has only such requests (codec.rs); then it is decided here, and nothing is made on the way that
-- can be done without. If another record is met, or one of a clock that was put back, this gives up
-- before anything is written, and the rest of the script begins anew.
--
-- An identity's state is its string: each request reads it, and puts another in its place. The numbers
-- are those of meter.lua, in microseconds, since terms in short have no other ticks.

-- What a script returns: the first `n` numbers.
local function tell(told, n)
  local FORMAT = '<I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7'
  local reply
  for first = 1, n, 32 do
    local last = math.min(first + 31, n)
    local format = string.sub(FORMAT, 1, 3 + 2 * (last - first))
    local part = struct.pack(format, _G.unpack(told, first, last))
    reply = reply and reply .. part or part
  end
  return reply
end

-- What to tell, how many numbers; the strings, and when those end that were changed. Nothing, if the
-- short way does not lead there.
local function decide_buckets(now)
  local struct, list, LOW = struct, _G.unpack, 2 ^ 48
  local pack, unpack = struct.pack, struct.unpack
  -- Arrays are made with some room, because growing them one by one is dear.
  local rules, packed, at = { nil, nil, nil }, ARGV[1], 1
  while at <= #packed do
    local _, id, code, _, drops_per_tick, drops_per_unit, capacity, farthest, _, terms, format, length,
      behind = unpack('<BI2BI7I7I7I7I7I7Bc0Bc0B', packed, at)
    -- There is a place for how many drops a request costs.
    rules[#rules + 1] = { id, code * 32, drops_per_tick, capacity, farthest, terms, format, length, 0,
      drops_per_unit }
    at = behind
  end

  local requests = ARGV[2]
  at = 5
  local values, ends = redis.call('MGET', list(KEYS)), { nil, nil, nil, nil }
  local told, n = { now, nil, nil, nil, nil }, 1
  local bits, bit = 0, 1
  local charged = { nil, nil, nil }
  while at <= #requests do
    local alike, count
    alike, count, at = unpack('<I2I2', requests, at)
    local charging, first, costs, length = count < 32768, nil, 0, 0
    count = count % 32768
    -- Whether they were admitted already.
    local counting = count >= 8192
    if counting then count = count - 8192 end
    for i = 1, count do
      local key, index, _, cost
      key, index, _, cost, at = unpack('<I2I2I2B', requests, at)
      if cost == 255 then cost, at = unpack('<I7', requests, at) end
      local rule = rules[index]
      first, charged[i], rule[9] = key, rule, cost * rule[10]
      costs, length = costs + cost, length + rule[8]
    end
    -- What costs nothing changes nothing.
    if costs == 0 then charging = false end

    -- The rule at hand, taken out of its table one by one, for that is faster than all at once; with one
    -- for all requests only once.
    local loaded, id, code, drops_per_tick, capacity, farthest, terms, format, record_length, drops
    for key = first, first + alike - 1 do
      local value, from = values[key], 1
      if value and #value ~= length then return end
      local admitted, fresh, after = true, now
      for i = 1, count do
        if loaded ~= i then
          local rule = charged[i]
          id = rule[1]
          code = rule[2]
          drops_per_tick = rule[3]
          capacity = rule[4]
          farthest = rule[5]
          terms = rule[6]
          format = rule[7]
          record_length = rule[8]
          drops = rule[9]
          loaded = i
        end
        local level, spare = 0, 0
        if value then
          local its_id, low, high, its_terms, its_spare = unpack(format, value, from)
          -- Records of other kinds would be far ahead, or not there yet at all.
          local ahead = low + (high - code) * LOW - now
          if its_id ~= id or its_terms ~= terms or high < code or ahead > farthest then return end
          if ahead > 0 then
            level = ahead
            if drops_per_tick > 1 then level = ahead * drops_per_tick - its_spare end
          end
          from = from + record_length
        end
        n = n + 1
        told[n] = level
        if drops > 0 then
          local before = level
          level = level + drops
          if level > capacity then
            admitted = false
            -- What is above twice the limit is not counted.
            if counting and level > 2 * capacity then level = math.max(before, 2 * capacity) end
          end
        end
        if charging and (admitted or counting) then
          if drops_per_tick > 1 then
            spare = -level % drops_per_tick
            level = (level + spare) / drops_per_tick
          end
          local empty = now + level
          if empty > fresh then fresh = empty end
          local low = empty % LOW
          local record = pack(format, id, low, (empty - low) / LOW + code, terms, spare)
          if after then after = after .. record else after = record end
        end
      end
      if admitted then bits = bits + bit end
      if charging and (admitted or counting) then values[key], ends[key] = after, fresh end
      bit = bit * 2
      if bit == 2 ^ 32 then
        n = n + 1
        told[n] = bits
        bits, bit = 0, 1
      end
    end
  end
  if bit > 1 then
    n = n + 1
    told[n] = bits
  end
  return told, n, values, ends
end

if string.byte(ARGV[2], 4) == 1 then
  local told, n, values, ends = decide_buckets(now)
  if told then
    write_strings(now, spare_ms, values, ends, string.byte(ARGV[2], 3) == 1)
    return tell(told, n)
  end
end
