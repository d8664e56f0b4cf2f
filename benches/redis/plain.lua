-- A generic cell rate algorithm in one string, as it is commonly written.
--
-- KEYS[1]  the bucket
-- ARGV[1]  microseconds in which one token comes back
-- ARGV[2]  how many fit
-- RETURNS  whether the request is admitted; how many tokens are left; milliseconds until all are back
local interval, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local arrival = math.max(tonumber(redis.call('GET', KEYS[1]) or now), now)
local ahead = arrival + interval - now
if ahead > burst * interval then
  return { 0, 0, math.ceil((arrival - now) / 1000) }
end
redis.call('SET', KEYS[1], string.format('%.0f', arrival + interval), 'PX', math.ceil(ahead / 1000))
return { 1, math.floor(burst - ahead / interval), math.ceil(ahead / 1000) }
