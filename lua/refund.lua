-- Gives back what one request was charged, as far as it has not come back by itself.
--
-- KEYS     the identities, then the rings of their sliding logs
-- ARGV[1]  the rules (identity.lua)
-- ARGV[2]  how many of the keys are identities (2 bytes); when the request was decided, in
--          microseconds (7); then for each charge the indices of its identity (2), rule (2) and ring
--          (2, or 0), its cost (7), and what its algorithm has to know of that moment (7)
-- ARGV[3]  in tests: the present, in microseconds
-- RETURNS  the present in microseconds
-- TTL      as in decide.lua; an identity that equals one never seen is deleted
local charges = ARGV[2]
local identities_count, spent_us, at = unpack('<I2I7', charges)
read_identities(identities_count)
while at <= #charges do
  local key, index, ring, cost, then_told
  key, index, ring, cost, then_told, at = unpack('<I2I2I2I7I7', charges, at)
  local rule = rules[index]
  -- Of one who is not known, nothing is left to give back.
  if values[key] then
    if not rule.states[key] then settle(key, rule, KEYS[ring]) end
    apart = apart or define_apart()
    local mark = apart.find_mark(key, rule)
    local raw, fresh = rule.kind.refund(rule, key, cost, spent_us, then_told, mark)
    if raw then apart.put_mark(key, rule, mark, raw, fresh) end
    change(key, rule)
  end
end
write_identities(false)
return now
