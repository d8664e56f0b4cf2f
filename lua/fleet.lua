-- Tells how many requests one instance of a fleet has in flight, and finds out how many all have.
--
-- KEYS     the fleet: a hash with a field for each instance, of its critical requests, its others, and
--          until when that counts, in milliseconds since the Unix epoch, as text with spaces between
-- ARGV[1]  the instance
-- ARGV[2]  for how many milliseconds its word counts; 0 if it is going
-- ARGV[3]  how many critical requests it has in flight
-- ARGV[4]  how many others
-- ARGV[5]  in tests: the present, in microseconds
-- RETURNS  how many critical requests all instances have in flight whose word counts, this one included,
--          how many others, and how many instances that are
-- TTL      the fleet is forgotten when the last word does not count any more; so is each instance, by
--          the first call after that
local call = redis.call
-- How many milliseconds the key outlives its use. Tests, whose time stands still, ask for more.
local now_ms, spare_ms
if ARGV[5] then
  now_ms, spare_ms = math.floor(tonumber(ARGV[5]) / 1000), 3600000
else
  local time = call('TIME')
  now_ms, spare_ms = time[1] * 1000 + math.floor(time[2] / 1000), 0
end
local fleet, lease_ms = KEYS[1], tonumber(ARGV[2])
if lease_ms > 0 then
  local word = string.format('%s %s %.0f', ARGV[3], ARGV[4], now_ms + lease_ms)
  call('HSET', fleet, ARGV[1], word)
else
  call('HDEL', fleet, ARGV[1])
end
local critical, others, instances, last_ms = 0, 0, 0, 0
local words = call('HGETALL', fleet)
for i = 1, #words, 2 do
  local its_critical, its_others, until_ms = string.match(words[i + 1], '^(%d+) (%d+) (%d+)$')
  until_ms = tonumber(until_ms)
  if until_ms and until_ms > now_ms then
    critical, others = critical + its_critical, others + its_others
    instances, last_ms = instances + 1, math.max(last_ms, until_ms)
  else
    call('HDEL', fleet, words[i])
  end
end
if instances > 0 then call('PEXPIRE', fleet, last_ms - now_ms + spare_ms) end
return { critical, others, instances }
