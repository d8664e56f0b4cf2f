-- Sliding log; the twin of algorithm/sliding_log.rs.
-- Rule: limit, window in microseconds.
-- Record: the newest time plus the window; the window; where the oldest time stands in the ring; how
-- many there are; how many the ring has room for.
-- Told, before this request: how many there are; the time that has to leave before one more unit can
-- be spent; the time that has to leave before this request can be admitted, or 0.
--
-- The ring is a string of its own with seven bytes for each unit spent. It grows by a quarter when it
-- is full, so that it is never much larger than what it holds.
local SlidingLog = {}
local TIME = 7

function SlidingLog.prepare(rule, limit, window_us)
  rule.limit, rule.window_us = limit, window_us
end

-- A part of the ring. What is no ring of ours is as good as gone.
local function get_range(ring, first, last)
  local bytes = redis.pcall('GETRANGE', ring, first, last)
  if type(bytes) == 'string' then return bytes end
  if string.find(bytes.err, 'WRONGTYPE', 1, true) then return '' end
  return error(bytes)
end

-- The times from `offset` on, oldest first, as far as the ring is there.
local function read_times(record, offset, count)
  local times = {}
  local start = (record.head + offset) % record.size
  while count > 0 do
    local length = min(count, record.size - start)
    local bytes = get_range(record.ring, start * TIME, (start + length) * TIME - 1)
    for at = 1, #bytes - TIME + 1, TIME do times[#times + 1] = unpack('<I7', bytes, at) end
    count, start = count - length, 0
  end
  return times
end

local function time_at(record, offset)
  return offset >= 0 and offset < record.length and read_times(record, offset, 1)[1] or 0
end

-- Writes the ring anew, with room for some more.
local function rewrite(rule, record, times)
  record.head, record.length = 0, #times
  record.size = max(#times, min(rule.limit, floor(#times * 1.25) + 4))
  local bytes = {}
  for i = 1, #times do bytes[i] = pack('<I7', times[i]) end
  bytes[#bytes + 1] = rep('\0', (record.size - #times) * TIME)
  call('SET', record.ring, table.concat(bytes), 'PX', ttl_ms(record.newest + rule.window_us))
end

-- Lets go of what has left the window. Mostly that is a time or two, so few are looked at at first.
local function let_go(rule, record)
  local look = 2
  while record.length > 0 do
    local times = read_times(record, 0, min(look, record.length))
    if #times < min(look, record.length) then
      -- The ring is gone.
      record.length = 0
      return
    end
    local gone = 0
    while gone < #times and times[gone + 1] + rule.window_us <= now do gone = gone + 1 end
    record.head, record.length = (record.head + gone) % record.size, record.length - gone
    if gone < #times then return end
    look = look * 4
  end
end

function SlidingLog.settle(rule, record, ring)
  record.ring = ring
  record.newest, record.head, record.length, record.size = 0, 0, 0, 0
  if not record.raw then return end
  local window_us
  window_us, record.head, record.length, record.size = unpack('<I7I3I3I3', record.raw, 12)
  record.newest = record.fresh - window_us
  if record.newest + rule.window_us <= now or record.length > record.size then
    record.length = 0
  elseif record.newest > now + rule.window_us then
    local times = read_times(record, 0, record.length)
    for i = 1, #times do times[i] = min(times[i], now) end
    record.newest, record.dirty = now, true
    rewrite(rule, record, times)
  end
  let_go(rule, record)
end

function SlidingLog.fits(rule, record, cost)
  return record.length + cost <= rule.limit or cost == 0
end

function SlidingLog.charge(rule, record, cost)
  local time = record.length > 0 and max(record.newest, now) or now
  record.newest = time
  if record.length + cost > record.size or record.length == 0 then
    local times = read_times(record, 0, record.length)
    for _ = 1, cost do times[#times + 1] = time end
    rewrite(rule, record, times)
    return
  end
  local bytes = pack('<I7', time)
  local start = (record.head + record.length) % record.size
  record.length = record.length + cost
  while cost > 0 do
    local length = min(cost, record.size - start)
    call('SETRANGE', record.ring, start * TIME, rep(bytes, length))
    cost, start = cost - length, 0
  end
  call('PEXPIRE', record.ring, ttl_ms(time + rule.window_us))
end

function SlidingLog.tell(rule, record, cost)
  local next_time = time_at(record, max(record.length - rule.limit, 0))
  local last = cost <= rule.limit and record.length + cost - rule.limit - 1 or -1
  return pack('<I3I7I7', record.length, next_time, time_at(record, last))
end

function SlidingLog.pack(rule, record)
  record.fresh = record.length > 0 and record.newest + rule.window_us or 0
  return pack('<I3BI7I7I3I3I3', rule.id, rule.length, record.fresh, rule.window_us,
    record.head, record.length, record.size)
end

-- Its own times and no others: an older time in the place of a newer one would leave sooner.
function SlidingLog.refund(rule, record, cost, spent_us)
  local kept = {}
  local times = read_times(record, 0, record.length)
  for i = #times, 1, -1 do
    if times[i] == spent_us and cost > 0 then
      cost = cost - 1
    else
      table.insert(kept, 1, times[i])
    end
  end
  if #kept == #times then return end
  record.newest = kept[#kept] or 0
  rewrite(rule, record, kept)
end
