-- The short way to decide. Most requests are about buckets, and most identities have records of these
-- and no others, one after the other, as they were left. Batches of such requests are decided here,
-- and nothing is made on the way that can be done without. Whatever else is met, this gives up before
-- anything is written, and the rest of the script begins anew.
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

-- What to tell, how many numbers; the strings, when those end that were changed, and whether the server
-- has MSETEX. Nothing, if this is not for the short way.
local function decide_buckets(now)
  local struct, list, LOW = struct, _G.unpack, 2 ^ 48
  local pack, unpack = struct.pack, struct.unpack
  -- Arrays are made with some room, because growing them one by one is dear.
  local rules, packed, at = { nil, nil, nil }, ARGV[1], 1
  while at <= #packed do
    -- Kind, id, code, tick, drops per tick, drops per unit, capacity, farthest, countable, terms,
    -- format, length; and at last a place for the cost.
    local rule = { unpack('<BI2BI7I7I7I7I7I7Bc0Bc0B', packed, at) }
    if rule[3] > 3 then return end
    rules[#rules + 1], at = rule, rule[13]
  end

  local requests, _, has_msetex = ARGV[2]
  _, has_msetex, at = unpack('<I2B', requests)
  local values, ends = redis.call('MGET', list(KEYS)), { nil, nil, nil, nil }
  local told, n = { now, nil, nil, nil, nil }, 1
  local bits, bit = 0, 1
  local charged = { nil, nil, nil }
  while at <= #requests do
    local alike, count
    alike, count, at = unpack('<I2I2', requests, at)
    local charging, first, costs, length = count < 32768, nil, 0, 0
    count = count % 32768
    for i = 1, count do
      local key, index, _, cost
      key, index, _, cost, at = unpack('<I2I2I2B', requests, at)
      if cost == 255 then cost, at = unpack('<I7', requests, at) end
      local rule = rules[index]
      -- The charges of a request are for one identity, and policies whose names happen to have the
      -- same hash are not told apart here.
      first = first or key
      if key ~= first then return end
      for j = 1, i - 1 do
        if charged[j][2] == rule[2] then return end
      end
      charged[i], rule[13] = rule, cost
      costs, length = costs + cost, length + rule[12]
    end
    -- What costs nothing changes nothing.
    if costs == 0 then charging = false end

    -- The rule at hand. With one for all requests it is taken out of its table once.
    local loaded, id, code, drops_per_tick, drops_per_unit, capacity, farthest, terms, format
    local record_length, drops
    for key = first, first + alike - 1 do
      local value, from = values[key], 1
      if value and #value ~= length then return end
      local admitted, fresh, after = true, now
      for i = 1, count do
        if loaded ~= i then
          id, code, _, drops_per_tick, drops_per_unit, capacity, farthest, _, terms, format,
            record_length, drops = list(charged[i], 2)
          loaded, code, drops = i, code * 32, drops * drops_per_unit
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
          level = level + drops
          if level > capacity then admitted = false end
        end
        if admitted and charging then
          if drops_per_tick > 1 then
            spare = -level % drops_per_tick
            level = (level + spare) / drops_per_tick
          end
          local empty = now + level
          if empty > fresh then fresh = empty end
          local low = empty % LOW
          local record = pack(format, id, low, (empty - low) / LOW + code, terms, spare)
          after = after and after .. record or record
        end
      end
      if admitted then
        bits = bits + bit
        if charging then values[key], ends[key] = after, fresh end
      end
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
  return told, n, values, ends, has_msetex == 1
end

do
  local told, n, values, ends, has_msetex = decide_buckets(now)
  if told then
    write_strings(now, ttl_ms, values, ends, has_msetex)
    return tell(told, n)
  end
end
