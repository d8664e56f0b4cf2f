-- Sliding window counter; the twin of algorithm/sliding_window.rs.
-- Rule: limit, tick in microseconds, window in ticks, the most that a count can be taken over as.
-- Record: the start of the window plus twice its length; its length; this window's and the last one's
-- count.
-- State: this window's count, the last one's, and the start. Told: the start and the two counts,
-- before the request.
local function define_sliding_window()
  local function start(rule, key)
    rule.starts[key], rule.states[key], rule.previous[key] = rule.start_now, 0, 0
  end

  -- Brings counts of windows of `window_us` to the window that starts at `to`.
  local function slide(start, current, previous, to, window_us)
    if start >= to then return start, current, previous end
    return to, 0, start + window_us == to and current or 0
  end

  local function read(rule, key, bytes, at)
    local id, low, high, window_us, current, previous = unpack('<I2I6BI7I7I7', bytes, at)
    if id ~= rule.id or high < rule.code or high > rule.code + 31 then return false end
    local fresh = low + (high - rule.code) * LOW
    local start = math.max(fresh - 2 * window_us, 0)
    -- What was counted over another window, or by a clock that was far ahead, is put to this one.
    local other = window_us ~= rule.window_us
    if other then
      start, current, previous = slide(start, current, previous, now - now % window_us, window_us)
    end
    local moved = start > now + 2 * window_us or other and current + previous > 0
    if moved then
      start, current, previous = rule.start_now, math.min(current + previous, rule.most), 0
    end
    rule.starts[key], rule.states[key], rule.previous[key] =
      slide(start, current, previous, rule.start_now, rule.window_us)
    return true, moved
  end

  -- Tells the state as it is before. Whether there is room, and the state after.
  local function ask(rule, key, cost, told, n)
    local start_us, current, previous = rule.starts[key], rule.states[key], rule.previous[key]
    told[n + 1], told[n + 2], told[n + 3] = start_us, current, previous
    local left = rule.window - math.floor(math.max(now - start_us, 0) / rule.tick_us)
    local used = current * rule.window + previous * left
    local fits = cost * rule.window <= math.max(rule.limit * rule.window - used, 0)
    return n + 3, fits, current + cost
  end

  local function write(rule, key)
    local current, previous = rule.states[key], rule.previous[key]
    local fresh = current + previous > 0 and rule.starts[key] + 2 * rule.window_us or 0
    local low = fresh % LOW
    return pack('<I2I6BI7I7I7', rule.id, low, (fresh - low) / LOW + rule.code, rule.window_us,
      current, previous), fresh
  end

  local function refund(rule, key, cost, spent_us)
    if spent_us >= rule.starts[key] then
      rule.states[key] = math.max(rule.states[key] - cost, 0)
    elseif spent_us + rule.window_us >= rule.starts[key] then
      rule.previous[key] = math.max(rule.previous[key] - cost, 0)
    end
  end

  local function prepare(kind, id, code, _, _, length, limit, tick_us, window, most)
    local window_us = window * tick_us
    return {
      kind = kind, read = read, ask = ask, write = write,
      states = {}, starts = {}, previous = {}, id = id, code = code * 32,
      length = length, limit = limit, tick_us = tick_us, window = window, most = most,
      window_us = window_us, start_now = now - now % window_us,
    }
  end

  return { prepare = prepare, start = start, refund = refund }
end
