-- Token bucket and leaky bucket; the twin of algorithm/meter.rs.
-- Rule: tick in microseconds, drops per tick, drops per unit, capacity in drops, how many ticks ahead
-- a state can be, how many drops can be counted.
-- Record: when the bucket is empty; the terms that it is counted by; the drops that the last tick has
-- to spare.
-- Told: the drops in the bucket before this request.
local Meter = {}

function Meter.prepare(rule, tick_us, drops_per_tick, drops_per_unit, capacity, farthest, countable)
  rule.tick_us, rule.drops_per_tick, rule.drops_per_unit = tick_us, drops_per_tick, drops_per_unit
  rule.capacity, rule.farthest, rule.countable = capacity, farthest, countable
  rule.tick = floor(now / tick_us)
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

-- The level of a bucket that was counted by other terms: tokens used stay used. The second result
-- says whether it has to be kept even if nothing is charged, since what was promised would not hold.
local function take_over(rule, record)
  local raw = record.raw
  local shape = unpack('<I2', raw, 12)
  local tick_us = 10 ^ (3 * floor(shape / 512))
  local wide, unit_width, units_width = floor(shape / 64) % 8, floor(shape / 8) % 8, shape % 8
  local at = 14
  local drops_per_tick, spare = 1, 0
  if wide > 0 then
    drops_per_tick, at = unpack('<I' .. wide, raw, at)
  end
  local drops_per_unit, units
  drops_per_unit, at = unpack('<I' .. unit_width, raw, at)
  units, at = unpack('<I' .. units_width, raw, at)
  if wide > 0 then spare = unpack('<I' .. wide, raw, at) end

  local ahead = floor(record.fresh / tick_us) - floor(now / tick_us)
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

function Meter.settle(rule, record)
  local raw = record.raw
  if not raw then
    record.level = 0
  elseif sub(raw, 12, rule.terms_end) == rule.terms then
    local ahead = record.fresh / rule.tick_us - rule.tick
    if ahead > rule.farthest then
      record.level, record.dirty = rule.capacity, true
    elseif ahead > 0 then
      local spare = rule.counters and unpack(rule.counters, raw, rule.terms_end + 1) or 0
      record.level = ahead * rule.drops_per_tick - spare
    else
      record.level = 0
    end
  else
    record.level, record.dirty = take_over(rule, record)
  end
end

function Meter.fits(rule, record, cost)
  return record.level + cost * rule.drops_per_unit <= rule.capacity or cost == 0
end

function Meter.charge(rule, record, cost)
  record.level = record.level + cost * rule.drops_per_unit
end

function Meter.tell(rule, record)
  return pack('<I7', record.level)
end

-- A record whose bucket holds more than a full one, by another quota. It says so, or it would look like
-- one of a clock that was put back.
local function pack_overfull(rule, record, spare)
  local units = ceil(record.level / rule.drops_per_unit)
  local shape = unpack('<I2', rule.terms)
  local own_width = shape % 8
  local width = own_width
  while units >= 256 ^ width do width = width + 1 end
  local terms = pack('<I2', shape - own_width + width)
    .. sub(rule.terms, 3, #rule.terms - own_width) .. pack('<I' .. width, units)
  if rule.counters then terms = terms .. pack(rule.counters, spare) end
  return pack('<I3BI7', rule.id, HEAD + #terms, record.fresh) .. terms
end

function Meter.pack(rule, record)
  local ticks = ceil(record.level / rule.drops_per_tick)
  local spare = ticks * rule.drops_per_tick - record.level
  record.fresh = (rule.tick + ticks) * rule.tick_us
  if record.level > rule.capacity then return pack_overfull(rule, record, spare) end
  return pack(rule.format, rule.id, rule.length, record.fresh, rule.terms, spare)
end

-- `level` is what the bucket held right after this was spent, of which the cost was the top.
function Meter.refund(rule, record, cost, spent_us, level)
  local elapsed = floor(now / rule.tick_us) - floor(spent_us / rule.tick_us)
  local drops = cost * rule.drops_per_unit
  local drained = max(elapsed, 0) * rule.drops_per_tick
  record.level = max(record.level - min(max(max(level, drops) - drained, 0), drops), 0)
end
