-- All small states of an identity are records in one string under one key. A record begins with
--   a hash of its policy's name and algorithm (2 bytes), and
--   the instant from which on it equals that of a caller never seen, with the record's code (7);
-- what follows is up to the algorithm. Whole numbers are little-endian. The codes:
--   0 to 3   a bucket, with terms in short (bit 0: and the units of a full one; bit 1: and drops to
--            spare)
--   4        a bucket with terms in full, behind the length of the record
--   5, 6, 7  fixed window, sliding window, sliding log; but 6 with the hash of a bucket is its mark
--            (meter.lua), which is a record of its own, because it may outlive that of the bucket
-- Records of policies that are not asked are kept as they are, as long as they mean something.

-- The rules that requests are held against, one after the other: kind, id, code, six numbers, the
-- terms and the format of a bucket's record, and the length of a record. A rule has the functions of
-- its kind, and its states by the index of their identity in KEYS.
local rules = {}
do
  local function define(index)
    if index == 1 then return define_meter() end
    if index == 2 then return define_fixed_window() end
    if index == 3 then return define_sliding_window() end
    return index == 4 and define_sliding_log() or define_leases()
  end
  local packed, kinds, at = ARGV[1], {}, 1
  while at <= #packed do
    local index, id, code, a, b, c, d, e, f, terms, format, length
    index, id, code, a, b, c, d, e, f, terms, format, length, at =
      unpack('<BI2BI7I7I7I7I7I7Bc0Bc0B', packed, at)
    local kind = kinds[index]
    if not kind then
      kind = define(index)
      kinds[index] = kind
    end
    local rule = kind.prepare(kind, id, code, terms, format, length, a, b, c, d, e, f)
    -- Requests may have different quotas of one policy: whoever comes last has its state. Policies whose
    -- names happen to have the same hash are at least told apart by their algorithms.
    for i = 1, #rules do
      if rules[i].id == id and rules[i].kind == kind then
        local twins = rules[i].twins or { rules[i] }
        twins[#twins + 1] = rule
        rules[i].twins, rule.twins = twins, twins
        break
      end
    end
    rules[#rules + 1] = rule
  end
end

-- The string of each identity, by its index in KEYS; where in it those records begin that were not
-- looked at; and which identities were changed.
local values, nexts, changed = {}, {}, {}
-- Records that stay as they are unless something is charged, by rule; and those that were taken out
-- of a string and belong to no rule, by identity.
local kept, others

-- Reads the strings of the first `count` keys.
local function read_identities(count)
  if count > 0 then values = call('MGET', _G.unpack(KEYS, 1, count)) end
end

-- For strings that are not as their rules left them.
local apart
local function define_apart()
  kept, others = {}, {}

  -- The length of a record, as far as it can be told.
  local function length_at(value, at, code)
    if code > 4 then return code == 5 and 16 or code == 6 and 30 or 25 end
    local byte = string.byte(value, at + 9)
    if not byte or code == 4 then return byte end
    return 10 + math.floor(byte / 32) * (1 + code % 2) + (code > 1 and 3 or 0)
  end

  -- Takes the rest of a string apart.
  local function read_all(key)
    local value, at = values[key], nexts[key] or 1
    local list = others[key] or {}
    others[key] = list
    if not value then return list end
    while at + 8 <= #value do
      local id, low, high = unpack('<I2I6B', value, at)
      local code = math.floor(high / 32)
      local length = length_at(value, at, code)
      -- This was written by somebody else.
      if not length or length < 10 or at + length - 1 > #value then break end
      local raw = string.sub(value, at, at + length - 1)
      list[#list + 1] = { id = id, code = code, fresh = low + high % 32 * LOW, raw = raw }
      at = at + length
    end
    nexts[key] = #value + 1
    return list
  end

  -- Whether a record is one of a rule's policy: its hash and its algorithm.
  local function belongs(record, rule)
    local code = rule.code / 32
    return record.id == rule.id and (record.code == code or record.code < 5 and code < 5)
  end

  -- A record that was not as its rule leaves it, or not where it was expected: that of another quota,
  -- or one behind others.
  local function take(key, rule, ring)
    local raw
    for i = 1, #(rule.twins or '') do
      local twin = rule.twins[i]
      if twin ~= rule and twin.states[key] then
        raw = kept[twin] and kept[twin][key] or twin:write(key)
        twin.states[key] = nil
        if kept[twin] then kept[twin][key] = nil end
      end
    end
    if not raw then
      local list = read_all(key)
      for i = 1, #list do
        if belongs(list[i], rule) then
          raw = table.remove(list, i).raw
          break
        end
      end
    end
    local read, moved
    if raw and #raw >= rule.length then read, moved = rule:read(key, raw, 1, ring) end
    if not read then
      local take_over = raw and rule.kind.take_over
      if take_over then moved = take_over(rule, key, raw) else rule.kind.start(rule, key, ring) end
      if take_over and not moved then
        kept[rule] = kept[rule] or {}
        kept[rule][key] = raw
      end
    end
    if moved then changed[key] = true end
  end

  -- The mark of a bucket, if it has one.
  local function find_mark(key, rule)
    local list = read_all(key)
    for i = 1, #list do
      local record = list[i]
      if record.id == rule.id and record.code == 6 and record.fresh > now then return record end
    end
  end

  -- Leaves a mark in place of another one.
  local function put_mark(key, rule, mark, raw, fresh)
    if not mark then
      mark = { id = rule.id, code = 6 }
      table.insert(others[key], mark)
    end
    mark.raw, mark.fresh = raw, fresh
  end

  -- Tells the marks that count of those buckets that were charged, when all is written. Returns how many
  -- numbers were told.
  local function tell_marks(told, n)
    for key in pairs(changed) do
      for _, record in ipairs(others[key] or {}) do
        for i = 1, record.code == 6 and #rules or 0 do
          if rules[i].id == record.id and rules[i].states[key] then
            local given_back, _, span = unpack('<I7I7I7', record.raw, 10)
            if now + span <= record.fresh then
              told[n + 1], told[n + 2], told[n + 3], told[n + 4] = key, record.id, given_back, span
              n = n + 4
            end
            break
          end
        end
      end
    end
    return n
  end

  return {
    read_all = read_all, take = take,
    find_mark = find_mark, put_mark = put_mark, tell_marks = tell_marks,
  }
end

-- Brings the state of a rule's policy for an identity to the present. Leases have no record.
local function settle(key, rule, ring)
  if rule.load then return rule:load(key, ring) end
  local value = values[key]
  if not rule.twins then
    if not value then return rule.kind.start(rule, key, ring) end
    local at = nexts[key] or 1
    local after = at + rule.length
    if after <= #value + 1 then
      -- Mostly what comes next is the one, and as this rule left it.
      local read, moved = rule:read(key, value, at, ring)
      if read then
        nexts[key] = after
        if moved then changed[key] = true end
        return
      end
    end
  end
  apart = apart or define_apart()
  apart.take(key, rule, ring)
end

-- Notes that the state of a rule's policy for an identity is not what is on record.
local function change(key, rule)
  changed[key] = true
  if kept and kept[rule] then kept[rule][key] = nil end
end

-- The records of an identity that was changed go into `parts`. Returns how many there are, and from
-- when on they mean nothing.
local function collect(key, parts)
  local count, fresh = 0, now
  for i = 1, #rules do
    local rule = rules[i]
    if rule.states[key] then
      local raw, until_us = kept and kept[rule] and kept[rule][key]
      if raw then
        local low, high = unpack('<I6B', raw, 3)
        until_us = low + high % 32 * LOW
      else
        raw, until_us = rule:write(key)
      end
      if until_us > now then
        count = count + 1
        parts[count] = raw
        if until_us > fresh then fresh = until_us end
      end
    end
  end
  local known = values[key]
  if known and (nexts[key] or 1) <= #known then
    apart = apart or define_apart()
    apart.read_all(key)
  end
  local list = others and others[key]
  for i = 1, #(list or '') do
    if list[i].fresh > now then
      count = count + 1
      parts[count] = list[i].raw
      fresh = math.max(fresh, list[i].fresh)
    end
  end
  return count, fresh
end

-- Writes what was changed.
local function write_identities(has_msetex)
  local parts, ends = {}, {}
  for key in pairs(changed) do
    local count, fresh = collect(key, parts)
    if count == 0 then
      call('DEL', KEYS[key])
    else
      values[key] = count == 1 and parts[1] or table.concat(parts, '', 1, count)
      ends[key] = fresh
    end
  end
  write_strings(now, spare_ms, values, ends, has_msetex)
end
