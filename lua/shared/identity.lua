-- All small states of an identity are records in one string under one key. A record is:
--   the id of its policy (3 bytes), its length (1), the instant from which on it equals that of a
--   caller never seen (7), and what the algorithm makes of the rest.
-- Whole numbers are little-endian. Records of policies that are not asked are kept as they are, as
-- long as they mean something.
local define = { define_meter, define_fixed_window, define_sliding_window, define_sliding_log }

-- The rules that requests are held against, one after the other: kind, id, six numbers, the terms to
-- be kept in a record, the format of what follows them, and the length of the whole. A rule has the
-- functions of its kind, and its states by the index of their identity in KEYS.
local function read_rules(packed)
  local rules, kinds, at = {}, {}, 1
  while at <= #packed do
    local index, id, a, b, c, d, e, f, terms, counters, length
    index, id, a, b, c, d, e, f, terms, counters, length, at =
      unpack('<BI3I7I7I7I7I7I7Bc0Bc0B', packed, at)
    local kind = kinds[index]
    if not kind then
      kind = define[index]()
      kinds[index] = kind
    end
    local rule = kind.prepare(kind, id, length, terms, counters, a, b, c, d, e, f)
    -- Requests may have different quotas of one policy: whoever comes last has its state.
    for i = 1, #rules do
      if rules[i].id == id then
        local twins = rules[i].twins or { rules[i] }
        twins[#twins + 1] = rule
        rules[i].twins, rule.twins = twins, twins
        break
      end
    end
    rules[#rules + 1] = rule
  end
  return rules
end

-- The string of each identity, by its index in KEYS; where in it those records begin that were not
-- looked at; and all that were taken out of it and belong to no rule.
local values, nexts, others = {}, {}, {}
-- Which identities were changed.
local changed = {}
-- Records that stay as they are unless something is charged, by rule.
local kept = {}

-- Reads the strings of the first `count` keys.
local function read_identities(count)
  if count > 0 then values = call('MGET', unpack_list(KEYS, 1, count)) end
end

-- Takes the rest of the string apart.
local function read_all(key)
  local value, at = values[key], nexts[key] or 1
  local list = others[key] or {}
  others[key] = list
  if not value then return list end
  while at + HEAD - 1 <= #value do
    local id, length, fresh = unpack('<I3BI7', value, at)
    -- This was written by somebody else.
    if length < HEAD or at + length - 1 > #value then break end
    list[#list + 1] = { id = id, fresh = fresh, raw = sub(value, at, at + length - 1) }
    at = at + length
  end
  nexts[key] = #value + 1
  return list
end

-- A record that was not as its rule leaves it, or not where it was expected: that of another quota,
-- or one behind others.
local function take_apart(key, rule, ring)
  local raw
  for i = 1, #(rule.twins or '') do
    local twin = rule.twins[i]
    if twin ~= rule and twin.states[key] then
      raw = kept[twin] and kept[twin][key] or twin.kind.write(twin, key)
      twin.states[key] = nil
      if kept[twin] then kept[twin][key] = nil end
    end
  end
  if not raw then
    local list = read_all(key)
    for i = 1, #list do
      if list[i].id == rule.id then
        raw = table.remove(list, i).raw
        break
      end
    end
  end
  if not raw then return rule.kind.start(rule, key, ring) end
  local read, moved = false
  if #raw >= rule.length then read, moved = rule.kind.read(rule, key, raw, 1, ring) end
  if not read then
    local take_over = rule.kind.take_over
    if take_over then moved = take_over(rule, key, raw) else rule.kind.start(rule, key, ring) end
    if not moved then
      kept[rule] = kept[rule] or {}
      kept[rule][key] = raw
    end
  end
  if moved then changed[key] = true end
end

-- Brings the state of a rule's policy for an identity to the present.
local function settle(key, rule, ring)
  local value, at = values[key], nexts[key] or 1
  if not value and not rule.twins then return rule.kind.start(rule, key, ring) end
  local after = at + rule.length
  if value and not rule.twins and after <= #value + 1 then
    -- Mostly what comes next is the one, and as this rule left it.
    local read, moved = rule.kind.read(rule, key, value, at, ring)
    if read then
      nexts[key] = after
      if moved then changed[key] = true end
      return
    end
  end
  take_apart(key, rule, ring)
end

-- Charges what there is room for.
local function charge(key, rule, cost)
  rule.kind.charge(rule, key, cost)
  changed[key] = true
  if kept[rule] then kept[rule][key] = nil end
end

-- The string of an identity that was changed, and from when on it means nothing.
local function write_identity(key, rules)
  local value, fresh
  for i = 1, #rules do
    local rule = rules[i]
    if rule.states[key] then
      local raw, until_us = kept[rule] and kept[rule][key]
      if raw then until_us = unpack('<I7', raw, 5) else raw, until_us = rule.kind.write(rule, key) end
      if until_us > now then
        value, fresh = value and value .. raw or raw, max(fresh or 0, until_us)
      end
    end
  end
  local at = nexts[key]
  if others[key] or values[key] and (not at or at <= #values[key]) then
    local list = read_all(key)
    for i = 1, #list do
      if list[i].fresh > now then
        value, fresh = (value or '') .. list[i].raw, max(fresh or 0, list[i].fresh)
      end
    end
  end
  return value, fresh
end

-- Writes what was changed, with the time that it is worth keeping. A power of two of milliseconds is
-- close enough: to be kept for longer is harmless, since a state is judged by the instants in it.
local function write_identities(rules, has_msetex)
  local batches, expiries, frexp = {}, {}, math.frexp
  for key in pairs(changed) do
    local value, fresh = write_identity(key, rules)
    if not value then
      call('DEL', KEYS[key])
    else
      local _, class = frexp(ttl_ms(fresh))
      local expiry = expiries[class]
      if not expiry then
        expiry = string.format('%d', 2 ^ class)
        expiries[class] = expiry
      end
      if has_msetex then
        -- One command for all that expire at the same time.
        local batch = batches[expiry] or {}
        batches[expiry] = batch
        batch[#batch + 1] = KEYS[key]
        batch[#batch + 1] = value
      else
        call('SET', KEYS[key], value, 'PX', expiry)
      end
    end
  end
  for expiry, batch in pairs(batches) do
    local count = #batch / 2
    batch[#batch + 1] = 'PX'
    batch[#batch + 1] = expiry
    call('MSETEX', count, unpack_list(batch))
  end
end
