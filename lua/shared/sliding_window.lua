-- Sliding window counter; the twin of algorithm/sliding_window.rs.
-- Rule: limit, tick in microseconds, window in ticks, the most that a count can be taken over as.
-- Record: the start of the window plus twice its length; its length; this window's and the last one's
-- count.
-- Told: the start of the window and the two counts before this request.
local SlidingWindow = {}

function SlidingWindow.prepare(rule, limit, tick_us, window, most)
  rule.limit, rule.tick_us, rule.window, rule.most = limit, tick_us, window, most
  rule.window_us = window * tick_us
  rule.start = now - now % rule.window_us
end

-- Brings counts of windows of `window_us` to the present.
local function slide(record, start, window_us)
  if record.start < start then
    record.previous = record.start + window_us == start and record.current or 0
    record.start, record.current = start, 0
  end
end

function SlidingWindow.settle(rule, record)
  if not record.raw then
    record.start, record.current, record.previous = rule.start, 0, 0
    return
  end
  local window_us
  window_us, record.current, record.previous = unpack('<I7I7I7', record.raw, 12)
  record.start = max(record.fresh - 2 * window_us, 0)
  -- What was counted over another window, or by a clock that was far ahead, is put to this one.
  local other = window_us ~= rule.window_us
  if other then slide(record, now - now % window_us, window_us) end
  if record.start > now + 2 * window_us or other and record.current + record.previous > 0 then
    record.current, record.previous = min(record.current + record.previous, rule.most), 0
    record.start, record.dirty = rule.start, true
  end
  slide(record, rule.start, rule.window_us)
end

local function headroom(rule, record)
  local left = rule.window - floor(max(now - record.start, 0) / rule.tick_us)
  return max(rule.limit * rule.window - (record.current * rule.window + record.previous * left), 0)
end

function SlidingWindow.fits(rule, record, cost)
  return cost * rule.window <= headroom(rule, record)
end

function SlidingWindow.charge(rule, record, cost)
  record.current = record.current + cost
end

function SlidingWindow.tell(rule, record)
  return pack('<I7I7I7', record.start, record.current, record.previous)
end

function SlidingWindow.pack(rule, record)
  local used = record.current + record.previous > 0
  record.fresh = used and record.start + 2 * rule.window_us or 0
  return pack('<I3BI7I7I7I7', rule.id, rule.length, record.fresh, rule.window_us,
    record.current, record.previous)
end

function SlidingWindow.refund(rule, record, cost, spent_us)
  if spent_us >= record.start then
    record.current = max(record.current - cost, 0)
  elseif spent_us + rule.window_us >= record.start then
    record.previous = max(record.previous - cost, 0)
  end
end
