-- Sliding log; the twin of algorithm/sliding_log.rs.
-- Rule: limit, window in microseconds.
-- Record: the newest time plus the window; the window; where the oldest time stands in the ring; how
-- many there are; how many the ring has room for.
-- State: a table of these. Told, before the request: how many there are; the time that has to leave
-- before one more unit can be spent; the time that has to leave before this request can be admitted,
-- or 0.
--
-- The ring is a string of its own with seven bytes for each unit spent. It grows by a quarter when it
-- is full, so that it is never much larger than what it holds.
local function define_sliding_log()
  local TIME = 7
  local rep = string.rep

  -- A part of the ring. What is no ring of ours is as good as gone.
  local function get_range(ring, first, last)
    local bytes = redis.pcall('GETRANGE', ring, first, last)
    if type(bytes) == 'string' then return bytes end
    if string.find(bytes.err, 'WRONGTYPE', 1, true) then return '' end
    return error(bytes)
  end

  -- The times from `offset` on, oldest first, as far as the ring is there.
  local function read_times(log, offset, count)
    local times = {}
    local start = (log.head + offset) % log.size
    while count > 0 do
      local length = math.min(count, log.size - start)
      local bytes = get_range(log.ring, start * TIME, (start + length) * TIME - 1)
      for at = 1, #bytes - TIME + 1, TIME do times[#times + 1] = unpack('<I7', bytes, at) end
      count, start = count - length, 0
    end
    return times
  end

  local function time_at(log, offset)
    return offset >= 0 and offset < log.length and read_times(log, offset, 1)[1] or 0
  end

  -- Writes the ring anew, with room for some more.
  local function rewrite(rule, log, times)
    log.head, log.length = 0, #times
    log.size = math.max(#times, math.min(rule.limit, math.floor(#times * 1.25) + 4))
    local bytes = {}
    for i = 1, #times do bytes[i] = pack('<I7', times[i]) end
    bytes[#bytes + 1] = rep('\0', (log.size - #times) * TIME)
    call('SET', log.ring, table.concat(bytes), 'PX', ttl_ms(log.newest + rule.window_us))
  end

  -- Lets go of what has left the window. Mostly that is a time or two, so few are looked at at first.
  local function let_go(rule, log)
    local look = 2
    while log.length > 0 do
      local times = read_times(log, 0, math.min(look, log.length))
      if #times < math.min(look, log.length) then
        -- The ring is gone.
        log.length = 0
        return
      end
      local gone = 0
      while gone < #times and times[gone + 1] + rule.window_us <= now do gone = gone + 1 end
      log.head, log.length = (log.head + gone) % log.size, log.length - gone
      if gone < #times then return end
      look = look * 4
    end
  end

  local function start(rule, key, ring)
    rule.states[key] = { ring = ring, newest = 0, head = 0, length = 0, size = 0 }
  end

  local function read(rule, key, bytes, at, ring)
    local id, low, high, window_us, head, count, size = unpack('<I2I6BI7I3I3I3', bytes, at)
    if id ~= rule.id or high < rule.code or high > rule.code + 31 then return false end
    local fresh = low + (high - rule.code) * LOW
    local log = { ring = ring, newest = fresh - window_us, head = head, length = count, size = size }
    rule.states[key] = log
    local moved = log.newest > now + rule.window_us
    if log.newest + rule.window_us <= now or count > size then
      log.length = 0
    elseif moved then
      local times = read_times(log, 0, count)
      for i = 1, #times do times[i] = math.min(times[i], now) end
      log.newest = now
      rewrite(rule, log, times)
    end
    let_go(rule, log)
    return true, moved
  end

  -- Tells the state as it is before. Whether there is room.
  local function ask(rule, key, cost, told, n)
    local log = rule.states[key]
    local last = cost <= rule.limit and log.length + cost - rule.limit - 1 or -1
    told[n + 1] = log.length
    told[n + 2] = time_at(log, math.max(log.length - rule.limit, 0))
    told[n + 3] = time_at(log, last)
    return n + 3, log.length + cost <= rule.limit or cost == 0
  end

  local function charge(rule, key, cost)
    local log = rule.states[key]
    local time = log.length > 0 and math.max(log.newest, now) or now
    log.newest = time
    if log.length + cost > log.size or log.length == 0 then
      local times = read_times(log, 0, log.length)
      for _ = 1, cost do times[#times + 1] = time end
      rewrite(rule, log, times)
      return
    end
    local bytes = pack('<I7', time)
    local start = (log.head + log.length) % log.size
    log.length = log.length + cost
    while cost > 0 do
      local length = math.min(cost, log.size - start)
      call('SETRANGE', log.ring, start * TIME, rep(bytes, length))
      cost, start = cost - length, 0
    end
    call('PEXPIRE', log.ring, ttl_ms(time + rule.window_us))
  end

  local function write(rule, key)
    local log = rule.states[key]
    local fresh = log.length > 0 and log.newest + rule.window_us or 0
    local low = fresh % LOW
    return pack('<I2I6BI7I3I3I3', rule.id, low, (fresh - low) / LOW + rule.code, rule.window_us,
      log.head, log.length, log.size), fresh
  end

  -- Its own times and no others: an older time in the place of a newer one would leave sooner.
  local function refund(rule, key, cost, spent_us)
    local log = rule.states[key]
    local times = read_times(log, 0, log.length)
    for i = #times, 1, -1 do
      if cost > 0 and times[i] == spent_us then times[i], cost = false, cost - 1 end
    end
    local kept = {}
    for i = 1, #times do
      if times[i] then kept[#kept + 1] = times[i] end
    end
    if #kept == #times then return end
    log.newest = kept[#kept] or 0
    rewrite(rule, log, kept)
  end

  local function prepare(kind, id, code, _, _, length, limit, window_us)
    return {
      kind = kind, read = read, ask = ask, charge = charge, write = write,
      states = {}, id = id, code = code * 32, length = length,
      limit = limit, window_us = window_us,
    }
  end

  return { prepare = prepare, start = start, refund = refund }
end
