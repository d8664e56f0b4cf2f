-- Token bucket and leaky bucket; the twin of algorithm/meter.rs.
-- Rule: tick in microseconds, drops per tick, drops per unit, capacity in drops, how many ticks ahead
-- a state can be, how many drops can be counted.
-- Record: when the bucket is empty; the terms that it is counted by; the drops that the last tick has
-- to spare.
-- State: the drops in the bucket. Told: the same, before the request.
local function define_meter()

  local function prepare(kind, id, length, terms, counters, tick_us, drops_per_tick,
      drops_per_unit, capacity, farthest, countable)
    return {
      kind = kind, states = {}, id = id, length = length, terms = terms, counters = counters,
      format = '<I3BI7c' .. #terms .. counters,
      tick_us = tick_us, drops_per_tick = drops_per_tick, drops_per_unit = drops_per_unit,
      capacity = capacity, farthest = farthest, countable = countable, tick = floor(now / tick_us),
    }
  end

  local function start(rule, key)
    rule.states[key] = 0
  end

  local function read(rule, key, bytes, at)
    local id, length, fresh, terms, spare = unpack(rule.format, bytes, at)
    if id ~= rule.id or length ~= rule.length or terms ~= rule.terms then return false end
    local ahead = fresh / rule.tick_us - rule.tick
    if ahead > rule.farthest then
      rule.states[key] = rule.capacity
      return true, true
    end
    if ahead <= 0 then
      rule.states[key] = 0
    elseif rule.drops_per_tick == 1 then
      rule.states[key] = ahead
    else
      rule.states[key] = ahead * rule.drops_per_tick - spare
    end
    return true, false
  end

  -- The least whole number that is not below a * b / c, or 2^53 if that is larger. The product may be
  -- beyond what doubles hold, so it is divided bit by bit.
  local function multiply_divide(a, b, c)
    local whole, rest = floor(b / c), b % c
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

  local function convert(rule, bytes)
    local fresh, shape, at = unpack('<I7I2', bytes, 5)
    local tick_us = 10 ^ (3 * floor(shape / 512))
    local wide, unit_width, units_width = floor(shape / 64) % 8, floor(shape / 8) % 8, shape % 8
    local drops_per_tick, spare, drops_per_unit, units = 1, 0
    if wide > 0 then drops_per_tick, at = unpack('<I' .. wide, bytes, at) end
    drops_per_unit, at = unpack('<I' .. unit_width, bytes, at)
    units, at = unpack('<I' .. units_width, bytes, at)
    if wide > 0 then spare = unpack('<I' .. wide, bytes, at) end

    local ahead = floor(fresh / tick_us) - floor(now / tick_us)
    if ahead > 2 * ceil(units * drops_per_unit / drops_per_tick) then return rule.capacity, true end
    local drops = max(ahead * drops_per_tick - spare, 0)
    if tick_us == rule.tick_us and drops_per_tick == rule.drops_per_tick
      and drops_per_unit == rule.drops_per_unit then
      return drops, false
    end
    local level = multiply_divide(drops, rule.drops_per_unit, drops_per_unit)
    if level == 0 then return 0, false end
    -- A level is that of the beginning of a tick, before what has drained in it since.
    level = level + multiply_divide(now % rule.tick_us, rule.drops_per_tick, rule.tick_us)
    local faster = rule.drops_per_tick / rule.drops_per_unit / rule.tick_us
      >= drops_per_tick / drops_per_unit / tick_us
    return min(level, rule.countable), level <= rule.countable and faster
  end

  -- Takes over what was counted by other terms: tokens used stay used. Returns whether it has to be
  -- kept even if nothing is charged, since what was promised would not hold.
  local function take_over(rule, key, bytes)
    local is_ours, level, keep = pcall(convert, rule, bytes)
    rule.states[key] = is_ours and level or 0
    return is_ours and keep
  end

  -- Whether there is room. Tells the state as it is before.
  local function ask(rule, key, cost, told, n)
    local level = rule.states[key]
    told[n + 1] = level
    return n + 1, level + cost * rule.drops_per_unit <= rule.capacity or cost == 0
  end

  local function charge(rule, key, cost)
    rule.states[key] = rule.states[key] + cost * rule.drops_per_unit
  end

  -- A bucket that holds more than a full one, by another quota, says so, or it would look like one of
  -- a clock that was put back.
  local function pack_overfull(rule, level, fresh, spare)
    local units = ceil(level / rule.drops_per_unit)
    local shape = unpack('<I2', rule.terms)
    local own_width = shape % 8
    local width = own_width
    while units >= 256 ^ width do width = width + 1 end
    local terms = pack('<I2', shape - own_width + width)
      .. sub(rule.terms, 3, #rule.terms - own_width) .. pack('<I' .. width, units)
    if rule.counters ~= '' then terms = terms .. pack('<' .. rule.counters, spare) end
    return pack('<I3BI7', rule.id, HEAD + #terms, fresh) .. terms
  end

  local function write(rule, key)
    local level = rule.states[key]
    local ticks = ceil(level / rule.drops_per_tick)
    local spare = ticks * rule.drops_per_tick - level
    local fresh = (rule.tick + ticks) * rule.tick_us
    if level > rule.capacity then return pack_overfull(rule, level, fresh, spare), fresh end
    return pack(rule.format, rule.id, rule.length, fresh, rule.terms, spare), fresh
  end

  -- `level` is what the bucket held right after this was spent, of which the cost was the top.
  local function refund(rule, key, cost, spent_us, level)
    local elapsed = floor(now / rule.tick_us) - floor(spent_us / rule.tick_us)
    local drops = cost * rule.drops_per_unit
    local drained = max(elapsed, 0) * rule.drops_per_tick
    local left = min(max(max(level, drops) - drained, 0), drops)
    rule.states[key] = max(rule.states[key] - left, 0)
  end

  return {
    prepare = prepare,
    start = start,
    read = read,
    take_over = take_over,
    ask = ask,
    charge = charge,
    write = write,
    refund = refund,
  }
end
