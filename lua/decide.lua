-- Decides requests, one after the other: each is charged to all of its policies or to none.
--
-- KEYS     the identities, then the rings of their sliding logs and the sets of their leases
-- ARGV[1]  the rules (identity.lua)
-- ARGV[2]  how many of the keys are identities (2 bytes), whether the server has MSETEX (1), whether
--          the short way may do (1; decide_buckets.lua); then for each run of requests that are alike,
--          but for their identities, how many they are (2), how many charges each has (2, plus 32768
--          if it only asks, plus 16384 if it asks for slots and is not alike to any other, plus 8192 if
--          it was admitted already and has to be counted whether there is room or not); if it asks for slots, the id of its lease (16), how many other leases are to end before (1), and for
--          each of those the same three indices as below, its slots (4) and its id (16); then for each
--          charge the indices of its identity (2; each further request has the next one), rule (2) and
--          ring or set (2, or 0) and its cost (1; 255 if it is larger than 254 and follows in 7 more)
-- ARGV[3]  in tests: the present, in microseconds
-- RETURNS  numbers of 7 bytes: the present in microseconds; then for up to 32 requests at a time what
--          was told of the states before each charge, and bits that tell which were admitted, lowest
--          first; at last for each bucket that was charged and has a mark that counts (meter.lua) the
--          index of its identity, the hash of its policy, the drops that were given back, and how long a
--          full bucket takes to drain
-- TTL      a key expires when all of its states equal those of a caller never seen, or later. Where
--          nothing was charged, nothing is written, unless a state had to be brought to another quota
--          or back from the future of a clock that was put back.
local requests, names, byte = ARGV[2], KEYS, string.byte
local identities_count, has_msetex, _, at = unpack('<I2BB', requests)
read_identities(identities_count)

-- Charges what there is room for.
local function charge(key, rule, cost, after, lease)
  if cost == 0 then return end
  if rule.sets then return rule:charge(key, cost, lease) end
  if after then rule.states[key] = after else rule:charge(key, cost) end
  changed[key] = true
  if kept then change(key, rule) end
end

local told, n = { now }, 1
local bits, bit = 0, 1
-- The charges of a request that has several, until all of them are known to fit.
local keys, charged, costs, afters
-- Where a run begins, and how many of its requests were decided.
local run, done = at, 0
local last = #requests
while at <= last do
  local alike, count
  alike, count, at = unpack('<I2I2', requests, at)
  local charging = count < 32768
  count = count % 32768
  local lease
  if count >= 16384 then
    count = count - 16384
    local ended = byte(requests, at + 16)
    lease = string.sub(requests, at, at + 15)
    at = at + 17
    for _ = 1, ended do
      local key, rule, set, slots, id
      key, rule, set, slots, id, at = unpack('<I2I2I2I4c16', requests, at)
      rules[rule]:release(key, names[set], slots, id)
    end
  end
  local admitted, was_admitted = true, count >= 8192
  if was_admitted then count = count - 8192 end
  for i = 1, count do
    local key, key_high, rule, rule_high, ring, ring_high, cost = byte(requests, at, at + 6)
    key, rule = key + key_high * 256 + done, rules[rule + rule_high * 256]
    at = at + 7
    if cost == 255 then cost, at = unpack('<I7', requests, at) end
    if not rule.states[key] then settle(key, rule, names[ring + ring_high * 256]) end
    local fits, after
    n, fits, after = rule:ask(key, cost, told, n)
    if not fits then admitted = false end
    if was_admitted then
      -- What is above twice the limit is not counted.
      after = rule.states[key] + cost * (rule.drops_per_unit or 1)
      after = math.min(after, 2 * (rule.capacity or rule.limit))
      if after > rule.states[key] then charge(key, rule, cost, after) end
    elseif count == 1 then
      if fits and charging then charge(key, rule, cost, after, lease) end
    else
      if not keys then keys, charged, costs, afters = {}, {}, {}, {} end
      keys[i], charged[i], costs[i], afters[i] = key, rule, cost, after
    end
  end
  if admitted then
    bits = bits + bit
    if charging and count > 1 and not was_admitted then
      for i = 1, count do charge(keys[i], charged[i], costs[i], afters[i], lease) end
    end
  end
  bit = bit * 2
  if bit == 2 ^ 32 then
    n = n + 1
    told[n] = bits
    bits, bit = 0, 1
  end
  done = done + 1
  if done < alike then at = run else run, done = at, 0 end
end
write_identities(has_msetex == 1)

if bit > 1 then
  n = n + 1
  told[n] = bits
end
-- Only strings that were taken apart may have marks.
if apart then n = apart.tell_marks(told, n) end
return tell(told, n)
