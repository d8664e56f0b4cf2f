-- Leases: slots of a concurrency limit that requests hold; their twin is concurrency/slots.rs.
-- Rule: limit, length of a lease in microseconds.
-- State: a sorted set of its own, with a member for each slot: who holds it and until when. Told, before
-- the request: how many slots are held.
local function define_leases()
  -- Finds out how many slots are held.
  local function load(rule, key, set)
    if rule.held[key] then return end
    look_over(set)
    rule.sets[key], rule.held[key] = set, call('ZCARD', set)
  end

  local function ask(rule, key, cost, told, n)
    told[n + 1] = rule.held[key]
    return n + 1, rule.held[key] + cost <= rule.limit or cost == 0
  end

  local function charge(rule, key, cost, id)
    rule.held[key] = rule.held[key] + cost
    hold(rule.sets[key], id, cost, rule.lease_us)
  end

  local function release(rule, key, set, slots, id)
    load(rule, key, set)
    rule.held[key] = rule.held[key] - let_go(set, id, slots)
  end

  local function prepare(kind, id, _, _, _, _, limit, lease_us)
    return {
      kind = kind, load = load, ask = ask, charge = charge, release = release,
      states = {}, sets = {}, held = {}, id = id, limit = limit, lease_us = lease_us,
    }
  end

  return { prepare = prepare }
end
