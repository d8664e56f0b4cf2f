-- Decides requests, one after the other: each is charged to all of its policies or to none.
--
-- KEYS     the identities, then the rings of their sliding logs
-- ARGV[1]  the rules (identity.lua)
-- ARGV[2]  how many of the keys are identities (2 bytes); whether the server has MSETEX (1); then for
--          each request how many charges it has (2, plus 32768 if it only asks), and for each of those
--          the indices of its identity (2), rule (2) and ring (2, or 0) and its cost (7)
-- ARGV[3]  in tests: the present, in microseconds
-- RETURNS  the present in microseconds (7); then for each request what its policies were told by the
--          states before it, and whether it was admitted (1)
-- TTL      a key expires when all of its states equal those of a caller never seen, rounded up. Where
--          nothing was charged, nothing is written, unless a state had to be brought to another quota
--          or back from the future of a clock that was put back.
local requests = ARGV[2]
local identities_count, has_msetex, at = unpack('<I2B', requests)
local rules = read_rules(ARGV[1])
read_identities(identities_count)

local told, n = { pack('<I7', now) }, 1
local asked_rules, asked_records, asked_costs = {}, {}, {}
local last = #requests
while at <= last do
  local count
  count, at = unpack('<I2', requests, at)
  local charging = count < 32768
  if not charging then count = count - 32768 end
  local admitted = true
  for i = 1, count do
    local key, index, ring, cost
    key, index, ring, cost, at = unpack('<I2I2I2I7', requests, at)
    local rule = rules[index]
    local record = settle(key, rule, KEYS[ring])
    admitted = rule.kind.fits(rule, record, cost) and admitted
    n = n + 1
    told[n] = rule.kind.tell(rule, record, cost)
    asked_rules[i], asked_records[i], asked_costs[i] = rule, record, cost
  end
  n = n + 1
  told[n] = admitted and '\1' or '\0'
  if admitted and charging then
    for i = 1, count do
      local rule, record, cost = asked_rules[i], asked_records[i], asked_costs[i]
      if cost > 0 then
        rule.kind.charge(rule, record, cost)
        record.dirty, record.records.dirty = true, true
      end
    end
  end
end
write_identities(has_msetex == 1)
return table.concat(told)
