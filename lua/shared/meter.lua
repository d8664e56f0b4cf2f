-- Token bucket and leaky bucket; the twin of algorithm/meter.rs.
-- Rule: tick in microseconds, drops per tick, drops per unit, capacity in drops, how many ticks ahead
-- a state can be, how many drops can be counted.
-- Record: when the bucket is empty; the terms that it is counted by; the drops that the last tick has
-- to spare, if a tick drains more than one. Terms are written in one of two ways (see `read_terms`).
-- Mark: until when it is kept; how many drops were given back; how many are a unit; how long a full
-- bucket takes to drain, in microseconds.
-- State: the drops in the bucket. Told: the same, before the request.

-- What only other quotas and refunds need.
local function define_meter_conversion()
  local PERIODS_MS = { [0] = 1, 10, 100, 1000, 2000, 5000, 10000, 15000, 20000, 30000, 60000, 120000,
    300000, 600000, 900000, 1200000, 1800000, 3600000, 7200000, 10800000, 14400000, 21600000,
    28800000, 43200000, 86400000, 604800000, 2592000000, 31536000000 }

  -- The least whole number that is not below a * b / c, or 2^53 if that is larger. The product may be
  -- beyond what doubles hold, so it is divided bit by bit.
  local function multiply_divide(a, b, c)
    local whole, rest = math.floor(b / c), b % c
    local quotient, remainder = 0, 0
    local bit = 2 ^ 53
    while bit >= 1 do
      quotient, remainder = quotient * 2, remainder * 2
      if remainder >= c then quotient, remainder = quotient + 1, remainder - c end
      if a >= bit then
        a, quotient, remainder = a - bit, quotient + whole, remainder + rest
        if remainder >= c then quotient, remainder = quotient + 1, remainder - c end
      end
      if quotient >= 2 ^ 53 then return 2 ^ 53 end
      bit = bit / 2
    end
    return remainder > 0 and quotient + 1 or quotient
  end

  local function gcd(a, b)
    while b > 0 do a, b = b, a % b end
    return a
  end

  -- The terms of a record: tick, drops per tick, drops per unit, units of a full bucket, and the drops
  -- to spare. The short way has the index of a common period, units per period, and the units of a
  -- full bucket if those are more or fewer; drops are microseconds then. The long way has it all.
  local function read_terms(bytes, code)
    if code == 4 then
      local shape, at = unpack('<I2', bytes, 11)
      local tick_us = 10 ^ (3 * math.floor(shape / 512))
      local wide, unit_width = math.floor(shape / 64) % 8, math.floor(shape / 8) % 8
      local units_width = shape % 8
      local drops_per_tick, spare, drops_per_unit, units = 1, 0
      if wide > 0 then drops_per_tick, at = unpack('<I' .. wide, bytes, at) end
      drops_per_unit, at = unpack('<I' .. unit_width, bytes, at)
      units, at = unpack('<I' .. units_width, bytes, at)
      if wide > 0 then spare = unpack('<I' .. wide, bytes, at) end
      return tick_us, drops_per_tick, drops_per_unit, units, spare
    end
    local shape = unpack('B', bytes, 10)
    local number = '<I' .. math.floor(shape / 32)
    local limit, at = unpack(number, bytes, 11)
    local units, spare = limit, 0
    if code % 2 == 1 then units, at = unpack(number, bytes, at) end
    if code >= 2 then spare = unpack('<I3', bytes, at) end
    local period = PERIODS_MS[shape % 32] * 1000
    local divisor = gcd(limit, period)
    return 1, limit / divisor, period / divisor, units, spare
  end

  local function convert(rule, bytes)
    local low, high = unpack('<I6B', bytes, 3)
    local fresh, code = low + high % 32 * LOW, math.floor(high / 32)
    local tick_us, drops_per_tick, drops_per_unit, units, spare = read_terms(bytes, code)
    local ahead = math.floor(fresh / tick_us) - math.floor(now / tick_us)
    local farthest = 2 * math.ceil(units * drops_per_unit / drops_per_tick)
    if ahead > farthest then return rule.capacity, true end
    local drops = math.max(ahead * drops_per_tick - spare, 0)
    if tick_us == rule.tick_us and drops_per_tick == rule.drops_per_tick
      and drops_per_unit == rule.drops_per_unit then
      return drops, false
    end
    local level = multiply_divide(drops, rule.drops_per_unit, drops_per_unit)
    if level == 0 then return 0, false end
    -- A level is that of the beginning of a tick, before what has drained in it since. What was taken over
    -- is that of the beginning of one of its own ticks.
    local since = math.max(now % rule.tick_us - now % tick_us, 0)
    level = level + multiply_divide(since, rule.drops_per_tick, rule.tick_us)
    local faster = rule.drops_per_tick / rule.drops_per_unit / rule.tick_us
      >= drops_per_tick / drops_per_unit / tick_us
    return math.min(level, rule.countable), level <= rule.countable and faster
  end

  -- A bucket that holds more than a full one, by another quota, says so, or it would look like one of
  -- a clock that was put back.
  local function write_overfull(rule, level, fresh, spare)
    local function width(number)
      local bytes = 1
      while number >= 256 ^ bytes do bytes = bytes + 1 end
      return bytes
    end
    local units = math.ceil(level / rule.drops_per_unit)
    local wide = rule.drops_per_tick > 1 and width(rule.drops_per_tick) or 0
    local unit_width, units_width = width(rule.drops_per_unit), width(units)
    local tick = rule.tick_us == 1 and 0 or rule.tick_us == 1000 and 1 or 2
    local length = 12 + 2 * wide + unit_width + units_width
    local raw = pack('<I2I6BBI2', rule.id, fresh % LOW, math.floor(fresh / LOW) + 4 * 32, length,
      tick * 512 + wide * 64 + unit_width * 8 + units_width)
    if wide > 0 then raw = raw .. pack('<I' .. wide, rule.drops_per_tick) end
    raw = raw .. pack('<I' .. unit_width .. 'I' .. units_width, rule.drops_per_unit, units)
    return wide > 0 and raw .. pack('<I' .. wide, spare) or raw
  end

  -- The most drops that are counted as given back; beyond it nothing is certain but how long a charge is ago.
  local MOST_GIVEN_BACK = 2 ^ 53

  -- `height` is what the bucket held right after this was spent, of which the cost was the top, and
  -- what had been given back by then; `mark` is its mark, if it has one. Returns the mark that it has
  -- from now on, and until when, if that is another one.
  local function refund(rule, key, cost, spent_us, height, mark)
    local span, given_back = math.ceil(rule.capacity / rule.drops_per_tick) * rule.tick_us, 0
    if mark then
      local drops_per_unit, its_span
      given_back, drops_per_unit, its_span = unpack('<I7I7I7', mark.raw, 10)
      if drops_per_unit ~= rule.drops_per_unit then given_back = MOST_GIVEN_BACK end
      if spent_us + its_span <= mark.fresh then height = height - given_back end
      span = math.max(span, its_span)
    end
    local drops = cost * rule.drops_per_unit
    height = math.min(math.max(height, drops), rule.capacity)
    local elapsed = math.floor(now / rule.tick_us) - math.floor(spent_us / rule.tick_us)
    local top = math.max(height - math.max(elapsed, 0) * rule.drops_per_tick, 0)
    local level = rule.states[key]
    local left = math.min(drops, top, level)
    rule.states[key] = level - left
    -- What lies above it sinks.
    if left > 0 and level > top then
      local fresh = math.max(mark and mark.fresh or 0, now + 2 * span)
      local low = fresh % LOW
      return pack('<I2I6BI7I7I7', rule.id, low, (fresh - low) / LOW + 6 * 32,
        math.min(given_back + left, MOST_GIVEN_BACK), rule.drops_per_unit, span), fresh
    end
  end

  return { convert = convert, write_overfull = write_overfull, refund = refund }
end

local function define_meter()
  local conversion

  local function read(rule, key, bytes, at)
    local id, low, high, terms, spare = unpack(rule.format, bytes, at)
    if id ~= rule.id or terms ~= rule.terms then return false end
    high = high - rule.code
    if high < 0 or high > 31 then return false end
    local ahead = (low + high * LOW) / rule.tick_us - rule.tick
    if ahead <= 0 then
      rule.states[key] = 0
    elseif ahead > rule.farthest then
      rule.states[key] = rule.capacity
      return true, true
    elseif rule.drops_per_tick == 1 then
      rule.states[key] = ahead
    else
      rule.states[key] = ahead * rule.drops_per_tick - spare
    end
    return true
  end

  -- Takes over what was counted by other terms: tokens used stay used. Returns whether it has to be
  -- kept even if nothing is charged, since what was promised would not hold.
  local function take_over(rule, key, bytes)
    conversion = conversion or define_meter_conversion()
    local is_ours, level, keep = pcall(conversion.convert, rule, bytes)
    if not is_ours then level, keep = 0, false end
    rule.states[key] = level
    if level > rule.capacity then
      rule.overfull = rule.overfull or {}
      rule.overfull[key] = true
    end
    return keep
  end

  -- Tells the state as it is before. Whether there is room, and the state after.
  local function ask(rule, key, cost, told, n)
    local level = rule.states[key]
    told[n + 1] = level
    local after = level + cost * rule.drops_per_unit
    return n + 1, after <= rule.capacity or cost == 0, after
  end

  local function write(rule, key)
    local level, drops_per_tick = rule.states[key], rule.drops_per_tick
    local ticks, spare = level, 0
    if drops_per_tick > 1 then
      spare = -level % drops_per_tick
      ticks = (level + spare) / drops_per_tick
    end
    local fresh = (rule.tick + ticks) * rule.tick_us
    if rule.overfull and rule.overfull[key] and level > rule.capacity then
      return conversion.write_overfull(rule, level, fresh, spare), fresh
    end
    local low = fresh % LOW
    local high = (fresh - low) / LOW + rule.code
    return pack(rule.format, rule.id, low, high, rule.terms, spare), fresh
  end

  local function prepare(kind, id, code, terms, format, length, tick_us, drops_per_tick,
      drops_per_unit, capacity, farthest, countable)
    return {
      kind = kind, read = read, ask = ask, write = write,
      states = {}, overfull = false, id = id, code = code * 32, terms = terms, length = length,
      format = format,
      tick_us = tick_us, drops_per_tick = drops_per_tick, drops_per_unit = drops_per_unit,
      capacity = capacity, farthest = farthest, countable = countable,
      tick = math.floor(now / tick_us),
    }
  end

  return {
    prepare = prepare,
    start = function(rule, key) rule.states[key] = 0 end,
    take_over = take_over,
    refund = function(...) return define_meter_conversion().refund(...) end,
  }
end
