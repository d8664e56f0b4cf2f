-- Fixed window; the twin of algorithm/fixed_window.rs.
-- Rule: limit, code of the span (calendar.lua), its period in microseconds, the longest it can be.
-- Record: the end of the window; the count.
-- Told: the end of the window and the count before this request.
local FixedWindow = {}

function FixedWindow.prepare(rule, limit, span, period, longest)
  rule.limit, rule.longest, rule.from_first_hit = limit, longest, span == 1
  rule.window_end = window_end[span](period)
end

function FixedWindow.settle(rule, record)
  local count = 0
  if record.raw and record.fresh > now then
    count = unpack('<I7', record.raw, 12)
  end
  record.count = count
  if count == 0 then
    record.window_end = rule.window_end
  elseif record.fresh - now > 2 * rule.longest then
    record.window_end, record.dirty = rule.window_end, true
  else
    record.window_end = record.fresh
  end
end

function FixedWindow.fits(rule, record, cost)
  return record.count + cost <= rule.limit or cost == 0
end

function FixedWindow.charge(rule, record, cost)
  record.count = record.count + cost
end

function FixedWindow.tell(rule, record)
  return pack('<I7I7', record.window_end, record.count)
end

function FixedWindow.pack(rule, record)
  record.fresh = record.count > 0 and record.window_end or 0
  return pack('<I3BI7I7', rule.id, rule.length, record.fresh, record.count)
end

-- `last_end` is the end of the window that it was spent in, or the latest that it can be.
function FixedWindow.refund(rule, record, cost, spent_us, last_end)
  local same = record.window_end == last_end
  if same or rule.from_first_hit and record.window_end < last_end then
    record.count = max(record.count - cost, 0)
  end
end
