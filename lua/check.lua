-- Tries each command that the other scripts need, so that a missing right is known by its name.
--
-- KEYS     a key that nobody else uses
-- ARGV[1]  1 if slots are leased
-- ARGV[2]  1 if instances of a fleet tell each other what they have in flight
-- RETURNS  the present in microseconds, as text; 1 if the server has MSETEX and it may be used; then
--          the names of the commands that were refused
-- TTL      the key lives for a millisecond, and is deleted at the end
local key = KEYS[1]
local function refused(...)
  local reply = redis.pcall(...)
  return type(reply) == 'table' and reply.err
end
-- A replica, or a server that is full, refuses for other reasons than rights. These have no code of
-- their own, and Valkey has other words for them than Redis.
local function is_about_rights(message)
  return string.find(message, 'user executing the script', 1, true)
    or string.find(message, 'ACL failure', 1, true)
end
local missing = {}
local function try(name, ...)
  local message = refused(name, ...)
  if message and is_about_rights(message) and not missing[name] then
    missing[#missing + 1], missing[name] = name, true
  end
end
try('MGET', key)
try('SET', key, '', 'PX', 1)
try('GETRANGE', key, 0, 0)
try('SETRANGE', key, 0, '0')
try('PEXPIRE', key, 1)
local has_msetex = not refused('MSETEX', 1, key, '', 'PX', 1)
try('DEL', key)
if ARGV[1] == '1' then
  try('ZADD', key, 0, 'slot')
  try('PEXPIRE', key, 1)
  try('ZCARD', key)
  try('PTTL', key)
  try('ZREM', key, 'slot')
  try('ZREMRANGEBYSCORE', key, 0, 0)
end
if ARGV[2] == '1' then
  try('HSET', key, 'instance', 0)
  try('PEXPIRE', key, 1)
  try('HGETALL', key)
  try('HDEL', key, 'instance')
end
local time = redis.pcall('TIME')
if time.err then
  missing[#missing + 1] = 'TIME'
  time = { 0, 0 }
end
return { string.format('%.0f', time[1] * 1000000 + time[2]), has_msetex and 1 or 0, unpack(missing) }
