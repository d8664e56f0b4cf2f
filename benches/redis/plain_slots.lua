-- Takes a slot of a limit, the plain way.
--
-- KEYS[1]  a sorted set: who holds a slot, and until when in seconds
-- ARGV     the limit; an id; for how many seconds a slot is held at most
-- RETURNS  1 if there was a slot
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
