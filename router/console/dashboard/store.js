// What is known of the router, asked for once a second as far as a view needs it.
import { ask, span, many, share, time, Refused } from './base.js';

export const store = {
  heard: 0, error: '', fleet: null, next: 0, points: [], columns: [], promise: { ttft: 0, tpot: 0 },
  events: [], nextEvent: 0, requests: new Map(), newest: '', cache: {}, cacheAt: 0, rates: {}, hits: null, planner: null,
};
const mostRequests = 10000, mostPoints = 900, mostEvents = 1000;

export const column = name => { const i = store.columns.indexOf(name); return store.points.map(p => p[i]); };
export const last = name => { const p = store.points[store.points.length - 1]; return p ? p[store.columns.indexOf(name)] : 0; };
export const members = () => store.fleet ? store.fleet.instances.filter(m => m.state !== 'gone') : [];

let polls = 0, busy = false;
// poll asks for what the view named needs. It never asks twice at once.
export async function poll(view) {
  if (busy) return;
  busy = true;
  const n = polls++, large = members().length > 200;
  try {
    const wants = [history(), happened()];
    if (n % (large ? 5 : 1) === 0 || !store.fleet) wants.push(ask('/admin/v1/instances').then(f => { store.fleet = f; }));
    if (view === 'requests' || view === 'fleet' && n % 2 === 0) wants.push(requests());
    if (n % ((large ? 15 : 2) * (view === 'fleet' || view === 'kv' ? 1 : 2)) === 0) wants.push(cache());
    if (view === 'events' && n % 5 === 0) wants.push(ask('/admin/v1/planner').then(p => { store.planner = p; }));
    await Promise.all(wants);
    store.heard = Date.now();
    store.error = '';
  } catch (e) {
    store.error = e instanceof Refused ? e.message : 'The router does not answer';
  } finally { busy = false; }
}

async function history() {
  const h = await ask('/admin/v1/history?after=' + store.next);
  if (h.next < store.next) store.points = []; // a router that started anew
  store.columns = h.columns;
  store.points.push(...h.points);
  store.points.splice(0, store.points.length - mostPoints);
  store.next = h.next;
  store.promise = { ttft: h.ttft_promise_s || 0, tpot: h.tpot_promise_s || 0 };
}

async function happened() {
  const e = await ask('/admin/v1/events?after=' + store.nextEvent);
  if (e.next < store.nextEvent) store.events = [];
  store.events.push(...e.events);
  store.events.splice(0, store.events.length - mostEvents);
  store.nextEvent = e.next;
}

// requests brings those that run, and those that ended since the last time.
async function requests() {
  const { requests: list } = await ask('/admin/v1/requests?after=' + encodeURIComponent(store.newest));
  const ran = new Set(list.map(r => r.id));
  for (const [id, r] of store.requests) if (!r.over && !ran.has(id)) store.requests.delete(id);
  for (const r of list) {
    r.t = Date.parse(r.start);
    store.requests.set(r.id, r);
    if (r.over && r.over > store.newest) store.newest = r.over;
  }
  if (store.requests.size > mostRequests + 500) {
    const old = [...store.requests.values()].sort((a, b) => b.t - a.t).slice(mostRequests);
    for (const r of old) store.requests.delete(r.id);
  }
}

async function cache() {
  const now = await ask('/admin/v1/cache'), at = performance.now(), seconds = (at - store.cacheAt) / 1000;
  let asked = 0, hit = 0;
  for (const [id, c] of Object.entries(now)) {
    const old = store.cache[id];
    if (!c.pool || !old || !old.pool) continue;
    asked += Math.max(0, c.pool.asked_tokens - old.pool.asked_tokens);
    hit += Math.max(0, c.pool.hit_tokens - old.pool.hit_tokens);
    if (c.moved && old.moved && store.cacheAt) store.rates[id] = { sent: Math.max(0, c.moved.sent_bytes - old.moved.sent_bytes) / seconds, stored: Math.max(0, c.moved.stored_bytes - old.moved.stored_bytes) / seconds,
      from: Object.fromEntries(Object.entries(c.moved.from || {}).map(([p, n]) => [p, Math.max(0, n - ((old.moved.from || {})[p] || 0)) / seconds])) };
  }
  store.hits = (store.hits || []).concat({ at: Date.now() / 1000, asked, hit }).slice(-450);
  store.cache = now;
  store.cacheAt = at;
}

// hitRate is of the last minute or, if nothing was asked for in it, of all time.
export function hitRate() {
  const since = Date.now() / 1000 - 60;
  let asked = 0, hit = 0;
  for (const h of store.hits || []) if (h.at >= since) { asked += h.asked; hit += h.hit; }
  if (asked) return { rate: hit / asked, of: 'of the last minute' };
  for (const c of Object.values(store.cache)) if (c.pool) { asked += c.pool.asked_tokens; hit += c.pool.hit_tokens; }
  return { rate: asked ? hit / asked : NaN, of: asked ? 'since the workers began' : 'nothing asked yet' };
}

// goodput is the part of the requests of the last minute that saw what is promised.
export function goodput() {
  const good = column('good'), judged = column('judged');
  let g = 0, j = 0;
  for (let i = Math.max(0, good.length - 60); i < good.length; i += 10) { const k = Math.min(i + 9, good.length - 1); g += good[k]; j += judged[k]; }
  return { rate: j ? g / j : NaN, judged: j };
}

// problems says in words what is wrong, the worst first: [{level, text}].
export function problems() {
  const out = [], f = store.fleet, now = Date.now(), bad = text => out.push({ level: 'bad', text }), warn = text => out.push({ level: 'warn', text });
  if (store.error) {
    bad(store.error + (store.heard ? `. What is below is ${span((now - store.heard) / 1000)} old.` : '.'));
    return out;
  }
  if (!f) return out;
  const at = Date.parse(f.at), ago = t => span((at - Date.parse(t)) / 1000);
  if (!f.ready) bad('Not ready: there is no live, probed, compatible pair. Requests get 503.');
  const moved = since => {
    const from = Date.parse(since) - 2000, i = store.columns.indexOf('taken_over'), t = store.columns.indexOf('at_ms');
    return store.points.reduce((n, p) => p[t] >= from ? n + p[i] : n, 0);
  };
  let listed = 0, more = 0;
  for (const m of f.instances) {
    const b = m.breaker || {}, say = (level, text) => { if (++listed > 6) more++; else out.push({ level, text }); };
    if (m.state === 'dead') {
      if (at - Date.parse(m.since) > 60000) continue;
      const n = moved(m.since);
      say('bad', `${m.id} has been dead for ${ago(m.since)}${m.reason ? ' (' + m.reason + ')' : ''}${n ? `, ${many(n, 'stream')} moved` : ''}.`);
    } else if (m.state === 'suspect') {
      const n = moved(m.since);
      say('bad', `${m.id} silent for ${ago(m.heard)}${n ? `, ${many(n, 'stream')} moved` : ''}. It gets no new work.`);
    } else if (m.state === 'unheard') say('warn', `${m.id} is not heard on NATS, but its HTTP answers.`);
    else if (m.state === 'live' && !m.probed && m.probe_error) say('warn', `${m.id} fails its probe: ${m.probe_error}`);
    if (m.state === 'live' && b.state && b.state !== 'closed') say('warn', `${m.id} gets no or few requests, its breaker is ${b.state}${b.why ? ': ' + b.why : ''}.`);
    const c = store.cache[m.id];
    if (c && c.pool && c.pool.quarantined && m.state !== 'dead') say('warn', `${m.id} has ${many(c.pool.quarantined, 'block')} in quarantine: a peer that is gone or stopped may still write there.`);
    if (m.state === 'live' && m.load.kv_used > .95) say('warn', `${m.id}'s KV pool is ${share(m.load.kv_used)} full.`);
  }
  const back = new Map(); // who was away in the last minute, and is well now
  for (const e of store.events) if (e.kind === 'fleet' && e.who && (e.level === 'bad' || e.text.startsWith('suspect')) && at - Date.parse(e.at) < 60000) back.set(e.who, e);
  for (const [id, e] of back) {
    if (!f.instances.some(m => m.id === id && m.state === 'live')) continue;
    const n = moved(e.at);
    warn(`${id} was away ${ago(e.at)} ago (${e.text})${n ? `, ${many(n, 'stream')} moved` : ''}. It is back.`);
  }
  if (more) warn(`… and ${many(more, 'more problem')} of workers: see Fleet.`);
  if (!f.link.up) warn(`NATS has been down for ${ago(f.link.since)}: the fleet is what was known then, and nobody joins.`);
  for (const r of f.refusals || []) warn(`${r.role} ${r.id} cannot be paired with ${r.refused} of ${r.of}, such as ${r.against}: ${Object.values(r.mismatch).join(' ')}`);
  const recent = name => column(name).slice(-60).reduce((a, b) => a + b, 0);
  const shed = recent('shed'), failed = recent('failed');
  if (shed) bad(`${many(shed, 'request')} got no place in the queue in the last minute: the fleet is too small for this load.`);
  if (failed) bad(`${many(failed, 'request')} failed in the last minute.`);
  if (last('waiting')) warn(`${many(last('waiting'), 'request')} wait${last('waiting') === 1 ? 's' : ''} for admission.`);
  const g = goodput();
  if (g.judged >= 5 && g.rate < .95) warn(`Only ${share(g.rate)} of the last minute's requests kept the promise (first token within ${time(store.promise.ttft)}, ${time(store.promise.tpot)} a token).`);
  return out.sort((a, b) => (b.level === 'bad') - (a.level === 'bad'));
}
