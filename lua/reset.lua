-- Forgets what is known of identities, as far as the policies of one request are concerned.
--
-- KEYS     the identities, then the rings of their sliding logs
-- ARGV[1]  the rules (identity.lua)
-- ARGV[2]  how many of the keys are identities (2 bytes); then for each charge the indices of its
--          identity (2), rule (2) and ring (2, or 0)
-- ARGV[3]  in tests: the present, in microseconds
-- RETURNS  the present in microseconds
-- TTL      as in decide.lua; an identity of which nothing is left is deleted
local charges = ARGV[2]
local identities_count, at = unpack('<I2', charges)
read_identities(identities_count)
while at <= #charges do
  local key, index, ring
  key, index, ring, at = unpack('<I2I2I2', charges, at)
  local rule = rules[index]
  if not rule.states[key] then settle(key, rule, KEYS[ring]) end
  rule.states[key], changed[key] = nil, true
  if ring > 0 then call('DEL', KEYS[ring]) end
end
write_identities(false)
return now
