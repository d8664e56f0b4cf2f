-- A lease holds one slot for each of its members: the id of its holder, and for every further slot the
-- id with a number behind it. A set is kept for a while longer than the last of its leases, so that its
-- own expiry has to be moved only now and then.

-- Forgets leases that have run out. What is no set of ours is as good as gone.
local function look_over(set)
  local reply = redis.pcall('ZREMRANGEBYSCORE', set, '-inf', now)
  if type(reply) == 'table' then
    if not string.find(reply.err, 'WRONGTYPE', 1, true) then return error(reply) end
    call('DEL', set)
  end
end

-- Takes a lease, or makes it last from now on. Returns how many of its slots were not held before.
local function hold(set, id, slots, lease_us)
  local added = call('ZADD', set, now + lease_us, id)
  for i = 2, slots do added = added + call('ZADD', set, now + lease_us, id .. pack('<I4', i)) end
  local lease_ms = ttl_ms(now + lease_us)
  if call('PTTL', set) < lease_ms then call('PEXPIRE', set, 2 * lease_ms) end
  return added
end

-- Ends a lease. Returns how many slots it held.
local function let_go(set, id, slots)
  local released = call('ZREM', set, id)
  for i = 2, slots do released = released + call('ZREM', set, id .. pack('<I4', i)) end
  return released
end
