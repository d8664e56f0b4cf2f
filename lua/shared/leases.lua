-- Leases: slots of a concurrency limit that requests hold; their twin is concurrency/slots.rs.
-- Rule: limit, length of a lease in microseconds.
-- State: a sorted set of its own, with a member for each slot: who holds it and until when. Told, before
-- the request: how many slots are held.
local function define_leases()
  -- How many slots of each set are held. Requests may have different limits on the same slots.
  local held = {}

  -- Finds out how many slots are held.
  local function load(rule, key, set)
    rule.sets[key] = set
    if held[set] then return end
    look_over(set)
    held[set] = call('ZCARD', set)
  end

  local function ask(rule, key, cost, told, n)
    local count = held[rule.sets[key]]
    told[n + 1] = count
    return n + 1, count + cost <= rule.limit or cost == 0
  end

  local function charge(rule, key, cost, id)
    local set = rule.sets[key]
    held[set] = held[set] + cost
    hold(set, id, cost, rule.lease_us)
  end

  local function release(rule, key, set, slots, id)
    load(rule, key, set)
    held[set] = held[set] - let_go(set, id, slots)
  end

  local function prepare(kind, id, _, _, _, _, limit, lease_us)
    return {
      kind = kind, load = load, ask = ask, charge = charge, release = release,
      states = {}, sets = {}, id = id, limit = limit, lease_us = lease_us,
    }
  end

  return { prepare = prepare }
end
