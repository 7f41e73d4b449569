"""The scripts of the ledger, in Lua as Redis runs it: each is atomic there.

Used by :mod:`kvboost.store.tiers.redis.ledger`, which says what each one answers. Under the prefix:

- ``ledger``: chunks and bytes, of all, of each tenant and of each space
- ``ledger:place``: the limit in bytes, of the first writer or of ``kvboost cache limit``; and when the ledger was begun
  (anew) and somebody last set about removing what may lie there beside it, until that is done
- ``ledger:entries``: for each chunk its size, parent, content, pieces, writer, and what :class:`BlockInfo` says
- ``ledger:recency``, ``ledger:leaves``, ``ledger:leaves:TENANT``: when used last; all, and those without successors
- ``ledger:due``: when an entry ends by itself: its writer's time is over, or its own; for most never
- ``ledger:of:TENANT:SPACE``: the chunks of each space
- ``ledger:successors``: how many stored chunks follow each key
- ``TENANT:SPACE:content:CONTENT``: the newest chunks of a content
- ``TENANT:SPACE:KEY``, ``TENANT:SPACE:KEY:SEAL:NUMBER``: a record, or its header, and the other pieces of it
- ``ledger:garbage``: where values lie elsewhere, those that must be removed there, and when somebody else may do that

Where values lie elsewhere (``APART``) a script cannot touch them. It answers ``{REPLY, GARBAGE}``: whoever ran it
removes these values. Until that is noted, nothing is written under their names, so that no late removal meets a new
value.

Invariants: entries, recency and due have as many members as the ledger counts chunks; where they have not, Redis has
dropped one of them, and the ledger begins anew. A chunk with successors, or one being written, is no victim.
"""

BESIDE = "local APART = false\n%s"
"""A script where values lie beside the ledger."""

APART = "local APART, garbage = true, {}\nlocal function run()\n%s\nend\nreturn {run(), garbage}"
"""A script where they lie elsewhere."""

COMMON = """
local P = KEYS[1] .. ':'
local L = P .. 'ledger'
local ENTRIES, RECENCY, LEAVES, DUE, SUCCESSORS =
  L .. ':entries', L .. ':recency', L .. ':leaves', L .. ':due', L .. ':successors'
local PLACE, GARBAGE = L .. ':place', L .. ':garbage'
local SWEEP_AGAIN = 300 * 1000000 -- longer than a sweep takes
local CLAIM, RETRY = 60 * 1000000, 2 * 1000000 -- the first is longer than anybody waits for a removal
local call = redis.call
local time = call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

local function entry(id)
  local packed = call('HGET', ENTRIES, id)
  if not packed then return nil end
  local size, parent, content, seal, pieces, writer, info = cmsgpack.unpack(packed)
  return {size = size, parent = parent, content = content, seal = seal, pieces = pieces, writer = writer, info = info}
end

local function write(id, e)
  call('HSET', ENTRIES, id, cmsgpack.pack(e.size, e.parent, e.content, e.seal, e.pieces, e.writer, e.info))
end

local function tenant_of(id) return string.sub(id, 1, string.find(id, ':', 1, true) - 1) end
local function space_of(id) return string.match(id, '^[^:]*:[^:]*') end
local function by_content(id, content) return P .. space_of(id) .. ':content:' .. content end

local function stamps(count)
  local last = math.max(now, tonumber(call('HGET', L, 'clock') or '0')) + count
  call('HSET', L, 'clock', string.format('%.0f', last))
  return last
end

local function count(id, chunks, bytes)
  call('HINCRBY', L, 'chunks', chunks)
  call('HINCRBY', L, 'bytes', bytes)
  local tenant, space = 'bytes:' .. tenant_of(id), space_of(id)
  if call('HINCRBY', L, tenant, bytes) == 0 then call('HDEL', L, tenant) end
  call('HINCRBY', L, 'bytes:' .. space, bytes)
  if call('HINCRBY', L, 'chunks:' .. space, chunks) == 0 then
    call('HDEL', L, 'chunks:' .. space, 'bytes:' .. space)
  end
end

local function members(space) return L .. ':of:' .. space end

local function value(id)
  if APART then return string.gsub(KEYS[1], '[{}]', '') .. ':{' .. id .. '}' end
  return P .. id
end

local function piece(id, seal, number) return value(id) .. ':' .. seal .. ':' .. number end

local function written(id, e)
  local keys = {value(id)}
  for number = 1, e.pieces - 1 do keys[#keys + 1] = piece(id, e.seal, number) end
  return keys
end

local function is_there(id, e) return APART or call('EXISTS', unpack(written(id, e))) == e.pieces end

local function claim(key)
  call('ZADD', GARBAGE, now + CLAIM, key)
  garbage[#garbage + 1] = key
end

local function discard(keys)
  if not APART then return call('UNLINK', unpack(keys)) end
  for _, key in ipairs(keys) do claim(key) end
end

local function add_leaf(id)
  local stamp = call('ZSCORE', RECENCY, id)
  if stamp and call('HEXISTS', SUCCESSORS, id) == 0 then
    call('ZADD', LEAVES, stamp, id)
    call('ZADD', LEAVES .. ':' .. tenant_of(id), stamp, id)
  end
end

local function remove_leaf(id)
  call('ZREM', LEAVES, id)
  call('ZREM', LEAVES .. ':' .. tenant_of(id), id)
end

local function drop(id, e)
  local keys = written(id, e)
  if not APART then keys[#keys + 1] = piece(id, e.seal, 0) end
  discard(keys)
  call('HDEL', ENTRIES, id)
  call('ZREM', RECENCY, id)
  call('ZREM', DUE, id)
  call('SREM', members(space_of(id)), id)
  remove_leaf(id)
  call('ZREM', by_content(id, e.content), id)
  count(id, -1, -e.size)
  if e.parent ~= '' then
    if call('HINCRBY', SUCCESSORS, e.parent, -1) <= 0 then
      call('HDEL', SUCCESSORS, e.parent)
      local parent = entry(e.parent)
      if parent and parent.writer == '' then add_leaf(e.parent) end
    end
  end
end

local function held(field) return tonumber(call('HGET', L, field) or '0') end

local function is_consistent()
  local chunks = held('chunks')
  return call('HLEN', ENTRIES) == chunks and call('ZCARD', RECENCY) == chunks and call('ZCARD', DUE) == chunks
end

local evicted, steps = 0, 0
local function evict(field, limit, leaves, at_once)
  while held(field) > limit do
    if steps >= at_once then return 'again' end
    steps = steps + 1
    local victim = call('ZRANGE', leaves, 0, 0)[1]
    if not victim then return 'refused' end
    local gone = entry(victim)
    if gone then
      drop(victim, gone)
      evicted = evicted + 1
    else
      call('ZREM', leaves, victim)
    end
  end
  return 'reserved'
end

local function reap(limit)
  for _, id in ipairs(call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, limit)) do
    local e = entry(id)
    if e then drop(id, e) else call('ZREM', DUE, id) end
  end
  if APART then
    for _, key in ipairs(call('ZRANGEBYSCORE', GARBAGE, '-inf', now, 'LIMIT', 0, limit)) do claim(key) end
  end
end
"""

RESERVE = """
local id, parent, content, seal, writer, info = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local size, pieces, lease, limit = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[11]), tonumber(ARGV[12])
local lost = 0
local function note_loss()
  local stamp = string.format('%.0f', now)
  call('HSET', PLACE, 'lost', stamp, 'sweeping', stamp)
end
local function begin_anew()
  for _, field in ipairs(call('HKEYS', L)) do
    local space = string.match(field, '^chunks:(.*)$')
    if space then call('UNLINK', members(space)) end
  end
  call('UNLINK', L, ENTRIES, RECENCY, LEAVES, DUE, SUCCESSORS)
  lost = 2
end

if not is_consistent() then
  begin_anew()
elseif call('EXISTS', L) == 0 then
  lost = 1
end
if lost > 0 then
  note_loss()
elseif call('HEXISTS', PLACE, 'lost') == 1 and now - tonumber(call('HGET', PLACE, 'sweeping') or '0') > SWEEP_AGAIN then
  lost = 3
  call('HSET', PLACE, 'sweeping', string.format('%.0f', now))
end
reap(limit)
local given = call('HGET', PLACE, 'capacity')
if not given then
  given = ARGV[9] ~= '' and ARGV[9] or string.format('%.0f', math.max(tonumber(ARGV[13]), held('bytes')))
  call('HSET', PLACE, 'capacity', given)
end
local capacity = tonumber(given)
local quota = ARGV[10] ~= '' and tonumber(ARGV[10]) or capacity
local e = entry(id)
if e then
  if e.writer ~= '' then return {'refused', 0, lost, capacity} end
  if is_there(id, e) then return {'present', 0, lost, capacity} end
  drop(id, e)
end
if APART and call('ZSCORE', GARBAGE, value(id)) then return {'refused', 0, lost, capacity} end

local tenant = tenant_of(id)
if held('bytes') + size > capacity or held('bytes:' .. tenant) + size > quota then
  -- Evict nothing in vain: its ancestors must stay, so they must fit together with it.
  local kept, above, steps = size, parent, 0
  while above ~= '' and steps < 4096 do
    local e = entry(above)
    if not e then break end
    kept, above, steps = kept + e.size, e.parent, steps + 1
  end
  if kept > capacity or kept > quota then return {'refused', 0, lost, capacity} end
end

e = {size = size, parent = parent, content = content, seal = seal, pieces = pieces, writer = writer, info = info}
write(id, e)
call('ZADD', RECENCY, stamps(1), id)
call('ZADD', DUE, now + lease * 1000, id)
count(id, 1, size)
call('SADD', members(space_of(id)), id)
if parent ~= '' then
  call('HINCRBY', SUCCESSORS, parent, 1)
  remove_leaf(parent)
end

local outcome = evict('bytes:' .. tenant, quota, LEAVES .. ':' .. tenant, limit)
if outcome == 'reserved' then outcome = evict('bytes', capacity, LEAVES, limit) end
if outcome == 'reserved' then return {outcome, evicted, lost, capacity} end
drop(id, e)
if outcome == 'again' then return {outcome, evicted, lost, capacity} end
if held('chunks') > 0 and call('EXISTS', LEAVES) == 0 and call('ZCOUNT', DUE, '-inf', now + lease * 1000) == 0 then
  begin_anew()
  note_loss()
end
return {'refused', evicted, lost, capacity}
"""

TRIM = """
local given = call('HGET', PLACE, 'capacity')
local capacity = given and tonumber(given) or math.huge
return {evict('bytes', capacity, LEAVES, tonumber(ARGV[1])), evicted}
"""

HAS = """
local e = entry(ARGV[1])
return e and e.writer == '' and is_there(ARGV[1], e) and 1 or 0
"""

NAMES = """
local names = {}
for _, id in ipairs(ARGV) do
  local e = entry(id)
  names[#names + 1] = e and e.writer == '' and written(id, e) or {}
end
return names
"""

FINISH = """
local id, writer, seal, pieces, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local keys = {APART and value(id) or piece(id, seal, 0)}
for number = 1, pieces - 1 do keys[#keys + 1] = piece(id, seal, number) end
local e = entry(id)
if not e or e.writer ~= writer then
  if not e or e.seal ~= seal then discard(keys) end
  return 0
end
if not APART then
  if call('EXISTS', unpack(keys)) ~= pieces then
    drop(id, e)
    return 0
  end
  call('RENAME', keys[1], value(id))
  keys[1] = value(id)
  for _, key in ipairs(keys) do
    if ttl > 0 then call('PEXPIRE', key, ttl) else call('PERSIST', key) end
  end
end
e.writer = ''
write(id, e)
call('ZADD', DUE, ttl > 0 and now + ttl * 1000 or 'inf', id)
add_leaf(id)
local content = by_content(id, e.content)
call('ZADD', content, call('ZSCORE', RECENCY, id), id)
call('ZREMRANGEBYRANK', content, 0, -1 - tonumber(ARGV[6]))
return 1
"""

TOUCH = """
local stamp = stamps(#ARGV) - #ARGV
for number, id in ipairs(ARGV) do
  call('ZADD', RECENCY, 'XX', 'GT', stamp + number, id)
  call('ZADD', LEAVES, 'XX', 'GT', stamp + number, id)
  call('ZADD', LEAVES .. ':' .. tenant_of(id), 'XX', 'GT', stamp + number, id)
end
return 0
"""

DELETE_MISSING = """
for _, id in ipairs(ARGV) do
  local e = entry(id)
  if e and e.writer == '' and not is_there(id, e) then drop(id, e) end
end
return 0
"""

REMOVE = """
for _, id in ipairs(ARGV) do
  local e = entry(id)
  if e then drop(id, e) else discard({value(id)}) end
end
return 0
"""

IS_WHOLE = """
return is_consistent() and call('EXISTS', L) == 1 and call('HEXISTS', PLACE, 'lost') == 0 and 1 or 0
"""

PURGE_SOME = """
local space, limit = ARGV[1], tonumber(ARGV[2])
if call('SCARD', members(space)) ~= held('chunks:' .. space) then return -1 end
local ids = call('SRANDMEMBER', members(space), limit)
for _, id in ipairs(ids) do
  local e = entry(id)
  if e then drop(id, e) else call('SREM', members(space), id) end
end
return #ids
"""

SWEPT = """
if call('HGET', PLACE, 'lost') == ARGV[1] then call('HDEL', PLACE, 'lost', 'sweeping') end
return 0
"""

VARIANTS = """
local space, limit = ARGV[1], tonumber(ARGV[2])
local answer = {}
for at = 3, #ARGV do
  local found = {}
  for _, id in ipairs(call('ZRANGE', P .. space .. ':content:' .. ARGV[at], 0, -1)) do
    local stamp = call('ZSCORE', RECENCY, id)
    if stamp then found[#found + 1] = {tonumber(stamp), id} end
  end
  table.sort(found, function(a, b) return a[1] < b[1] end)
  local infos = {}
  for number = math.max(1, #found - limit + 1), #found do
    local e = entry(found[number][2])
    if e and e.writer == '' then infos[#infos + 1] = {found[number][2], e.info} end
  end
  answer[#answer + 1] = infos
end
return answer
"""

TOTALS = """
reap(tonumber(ARGV[1]))
local totals = {}
for at = 2, #ARGV do totals[#totals + 1] = tonumber(call('HGET', L, ARGV[at]) or '0') end
return totals
"""

DESCRIBE = """
local described = {}
for _, id in ipairs(ARGV) do
  local e = entry(id)
  local stamp = e and call('ZSCORE', RECENCY, id)
  if stamp and e.writer == '' then
    described[#described + 1] = {e.size, math.floor(tonumber(stamp) / 1000000)}
  else
    described[#described + 1] = false
  end
end
return described
"""

ORPHANS = """
for _, key in ipairs(ARGV) do
  local space, content = string.match(key, '^([^:]*:[^:]*):content:(.*)$')
  local listed = string.match(key, '^ledger:of:(.*)$')
  if listed then
    if held('chunks:' .. listed) == 0 then call('UNLINK', P .. key) end
  elseif content then
    for _, id in ipairs(call('ZRANGE', P .. key, 0, -1)) do
      if call('HEXISTS', ENTRIES, id) == 0 then call('ZREM', P .. key, id) end
    end
  else
    local id = string.match(key, '^[^:]*:[^:]*:[^:]*')
    if id and call('HEXISTS', ENTRIES, id) == 0 then call('UNLINK', P .. key) end
  end
end
return 0
"""

RELEASE = """
for _, key in ipairs(ARGV) do call('ZADD', GARBAGE, 'XX', now + RETRY, key) end
return 0
"""

STRAYS = """
for _, key in ipairs(ARGV) do
  local id = string.match(key, '{(.*)}')
  if id and call('HEXISTS', ENTRIES, id) == 0 then claim(key) end
end
return 0
"""
