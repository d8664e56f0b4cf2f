-- All small states of an identity are records in one string under one key. A record is:
--   the id of its policy (3 bytes), its length (1), the instant from which on it equals that of a
--   caller never seen (7), and what the algorithm makes of the rest.
-- Whole numbers are little-endian. Records of policies that are not asked are kept as they are, as
-- long as they mean something.
local kinds = { Meter, FixedWindow, SlidingWindow, SlidingLog }

-- The rules that requests are held against, one after the other: kind, id, six numbers, the terms to
-- be kept in a record, and the format of what follows them.
local function read_rules(packed)
  local rules, at = {}, 1
  while at <= #packed do
    local kind, id, a, b, c, d, e, f, terms, counters
    kind, id, a, b, c, d, e, f, terms, counters, at =
      unpack('<BI3I7I7I7I7I7I7Bc0Bc0', packed, at)
    local rule = { kind = kinds[kind], id = id, terms = terms, terms_end = HEAD + #terms }
    rule.format = '<I3BI7' .. (#terms > 0 and 'c' .. #terms or '') .. counters
    rule.length = struct.size(rule.format)
    rule.counters = #counters > 0 and '<' .. counters or nil
    rule.kind.prepare(rule, a, b, c, d, e, f)
    rules[#rules + 1] = rule
  end
  return rules
end

-- The records of each identity, by its index in KEYS.
local identities = {}
local values

-- Reads the strings of the first `count` keys.
local function read_identities(count)
  values = count > 0 and call('MGET', unpack_list(KEYS, 1, count)) or {}
end

local function records_of(key)
  local records = identities[key]
  if records then return records end
  records = {}
  local value = values[key]
  if value then
    local at, last = 1, #value
    while at + HEAD - 1 <= last do
      local id, length, fresh = unpack('<I3BI7', value, at)
      -- This was written by somebody else.
      if length < HEAD or at + length - 1 > last then break end
      local raw = sub(value, at, at + length - 1)
      records[#records + 1] = { id = id, fresh = fresh, raw = raw, records = records }
      at = at + length
    end
  end
  identities[key] = records
  return records
end

-- The state of a rule's policy for an identity, brought to the present.
local function settle(key, rule, ring)
  local records = records_of(key)
  local record
  for i = 1, #records do
    if records[i].id == rule.id then
      record = records[i]
      break
    end
  end
  if not record then
    record = { id = rule.id, fresh = 0, records = records }
    records[#records + 1] = record
  end
  if record.rule ~= rule then
    -- By another quota of the same policy, if requests have different ones.
    if record.dirty then
      record.raw, record.dirty = record.rule.kind.pack(record.rule, record), false
    end
    rule.kind.settle(rule, record, ring)
    record.rule = rule
    if record.dirty then records.dirty = true end
  end
  return record
end

-- Writes what was changed, each identity with the time that it is worth keeping.
local function write_identities(has_msetex)
  local batches = {}
  for key, records in pairs(identities) do
    if records.dirty then
      local parts, fresh = {}, 0
      for i = 1, #records do
        local record = records[i]
        if record.dirty then record.raw = record.rule.kind.pack(record.rule, record) end
        if record.fresh >= now and record.raw then
          parts[#parts + 1] = record.raw
          if record.fresh > fresh then fresh = record.fresh end
        end
      end
      local value = #parts > 1 and table.concat(parts) or parts[1]
      if not value then
        call('DEL', KEYS[key])
      elseif has_msetex then
        -- One command for all whose times are about the same. To be kept for longer is harmless:
        -- a state is judged by the instants in it.
        local _, class = math.frexp(ttl_ms(fresh))
        local batch = batches[class]
        if not batch then
          batch = {}
          batches[class] = batch
        end
        batch[#batch + 1] = KEYS[key]
        batch[#batch + 1] = value
      else
        call('SET', KEYS[key], value, 'PX', ttl_ms(fresh))
      end
    end
  end
  for class, batch in pairs(batches) do
    local pairs_count = #batch / 2
    batch[#batch + 1] = 'PX'
    batch[#batch + 1] = 2 ^ class
    call('MSETEX', pairs_count, unpack_list(batch))
  end
end
