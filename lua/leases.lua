-- Makes leases last, and ends others.
--
-- KEYS     the sets of leases
-- ARGV[1]  the length of a lease in microseconds (7 bytes); then for each lease that is to last the index
--          of its set (2), how many slots it holds (4), and its id (16)
-- ARGV[2]  the same, but for the length, for each lease that is to end
-- ARGV[3]  in tests: the present, in microseconds
-- RETURNS  numbers of 4 bytes: the indices, from 0, of leases that had run out before they were to last.
--          They hold their slots again, even if there are too many then: who holds them is still at work.
-- TTL      a set expires between one and two lengths of a lease after the last was taken or made to last
for i = 1, #KEYS do look_over(KEYS[i]) end
local lasting, at = ARGV[1], 8
local lease_us = unpack('<I7', lasting)
local lost, count = {}, 0
while at <= #lasting do
  local index, slots, id
  index, slots, id, at = unpack('<I2I4c16', lasting, at)
  if hold(KEYS[index], id, slots, lease_us) > 0 then lost[#lost + 1] = pack('<I4', count) end
  count = count + 1
end
local ending
ending, at = ARGV[2], 1
while at <= #ending do
  local index, slots, id
  index, slots, id, at = unpack('<I2I4c16', ending, at)
  let_go(KEYS[index], id, slots)
end
return table.concat(lost)
