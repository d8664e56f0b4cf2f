-- Fixed window; the twin of algorithm/fixed_window.rs.
-- Rule: limit, code of the span (calendar.lua), its period in microseconds, the longest it can be.
-- Record: the end of the window; the count.
-- State: the count, and the end of the window. Told: the end and the count, before the request.
local function define_fixed_window()
  local window_end = define_calendar()

  local function start(rule, key)
    rule.states[key], rule.ends[key] = 0, rule.window_end
  end

  local function read(rule, key, bytes, at)
    local id, low, high, count = unpack('<I2I6BI7', bytes, at)
    if id ~= rule.id or high < rule.code or high > rule.code + 31 then return false end
    local fresh = low + (high - rule.code) * LOW
    if fresh <= now or count == 0 then
      start(rule, key)
      return true, false
    end
    local far_ahead = fresh - now > 2 * rule.longest
    rule.states[key], rule.ends[key] = count, far_ahead and rule.window_end or fresh
    return true, far_ahead
  end

  -- Tells the state as it is before. Whether there is room, and the state after.
  local function ask(rule, key, cost, told, n)
    local count = rule.states[key]
    told[n + 1], told[n + 2] = rule.ends[key], count
    local after = count + cost
    return n + 2, after <= rule.limit or cost == 0, after
  end

  local function write(rule, key)
    local count = rule.states[key]
    local fresh = count > 0 and rule.ends[key] or 0
    local low = fresh % LOW
    return pack('<I2I6BI7', rule.id, low, (fresh - low) / LOW + rule.code, count), fresh
  end

  -- `last_end` is the end of the window that it was spent in, or the latest that it can be.
  local function refund(rule, key, cost, spent_us, last_end)
    local same = rule.ends[key] == last_end
    if same or rule.from_first_hit and rule.ends[key] < last_end then
      rule.states[key] = math.max(rule.states[key] - cost, 0)
    end
  end

  local function prepare(kind, id, code, _, _, length, limit, span, period, longest)
    return {
      kind = kind, read = read, ask = ask, write = write,
      states = {}, ends = {}, id = id, code = code * 32, length = length,
      limit = limit, longest = longest, from_first_hit = span == 1,
      window_end = window_end[span](period),
    }
  end

  return { prepare = prepare, start = start, refund = refund }
end
