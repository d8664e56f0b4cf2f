-- Decides requests, one after the other: each is charged to all of its policies or to none.
--
-- KEYS     the identities, then the rings of their sliding logs and the sets of their leases
-- ARGV[1]  the rules (identity.lua)
-- ARGV[2]  how many of the keys are identities (2 bytes), whether the server has MSETEX (1); then for
--          each request how many charges it has (2, plus 32768 if it only asks, plus 16384 if it asks for
--          slots); if it asks for slots, the id of its lease (16), how many other leases are to end before
--          (1), and for each of those the same three indices as below, its slots (4) and its id (16); then
--          for each charge the indices of its identity (2), rule (2) and ring or set (2, or 0) and its cost
--          (1; 255 if it is larger than 254 and follows in 7 more)
-- ARGV[3]  in tests: the present, in microseconds
-- RETURNS  numbers of 7 bytes: the present in microseconds; what was told of the states before each
--          charge; and bits that tell which requests were admitted, 32 to a number, lowest first
-- TTL      a key expires when all of its states equal those of a caller never seen, or later. Where
--          nothing was charged, nothing is written, unless a state had to be brought to another quota
--          or back from the future of a clock that was put back.
local requests, names, byte = ARGV[2], KEYS, string.byte
local identities_count, has_msetex, at = unpack('<I2B', requests)
read_identities(identities_count)

-- Charges what there is room for.
local function charge(key, rule, cost, after, lease)
  if cost == 0 then return end
  if rule.held then return rule:charge(key, cost, lease) end
  if after then rule.states[key] = after else rule:charge(key, cost) end
  changed[key] = true
  if kept then change(key, rule) end
end

local told, n = { now }, 1
local bits, bit, words = 0, 1
-- The charges of a request that has several, until all of them are known to fit.
local keys, charged, costs, afters
local last = #requests
while at <= last do
  local count, high = byte(requests, at, at + 1)
  local charging = high < 128
  count = count + high % 64 * 256
  at = at + 2
  local lease
  if high % 128 >= 64 then
    local ended = byte(requests, at + 16)
    lease = string.sub(requests, at, at + 15)
    at = at + 17
    for _ = 1, ended do
      local key, rule, set, slots, id
      key, rule, set, slots, id, at = unpack('<I2I2I2I4c16', requests, at)
      rules[rule]:release(key, names[set], slots, id)
    end
  end
  local admitted = true
  for i = 1, count do
    local key, key_high, rule, rule_high, ring, ring_high, cost = byte(requests, at, at + 6)
    key, rule = key + key_high * 256, rules[rule + rule_high * 256]
    at = at + 7
    if cost == 255 then cost, at = unpack('<I7', requests, at) end
    if not rule.states[key] then settle(key, rule, names[ring + ring_high * 256]) end
    local fits, after
    n, fits, after = rule:ask(key, cost, told, n)
    if not fits then admitted = false end
    if count == 1 then
      if fits and charging then charge(key, rule, cost, after, lease) end
    else
      if not keys then keys, charged, costs, afters = {}, {}, {}, {} end
      keys[i], charged[i], costs[i], afters[i] = key, rule, cost, after
    end
  end
  if admitted then
    bits = bits + bit
    if charging and count > 1 then
      for i = 1, count do charge(keys[i], charged[i], costs[i], afters[i], lease) end
    end
  end
  bit = bit * 2
  if bit == 2 ^ 32 then
    words = words or {}
    words[#words + 1] = bits
    bits, bit = 0, 1
  end
end
write_identities(has_msetex == 1)

for i = 1, #(words or '') do
  n = n + 1
  told[n] = words[i]
end
if bit > 1 then
  n = n + 1
  told[n] = bits
end
local reply = ''
local FORMAT = '<I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7'
for i = 1, n, 32 do
  local size = math.min(32, n - i + 1)
  reply = reply .. pack(string.sub(FORMAT, 1, 1 + 2 * size), _G.unpack(told, i, i + size - 1))
end
return reply
