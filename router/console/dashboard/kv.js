// KV: what each worker keeps, where, how often it helps, and what is pinned.
import { Table, ask, bytes, count, el, inOrder, many, session, setText, share, speed, sure, tell } from './base.js';
import { hitRate, members, store } from './store.js';

export const title = 'KV';
let tiles = {}, table, pins, pinned = '';

function sums() {
  const s = { blocks: 0, held: 0, cached: 0, free: 0, quarantined: 0, asked: 0, hit: 0, tiers: new Map(), sent: 0, stored: 0 };
  for (const c of Object.values(store.cache)) {
    if (!c.pool) continue;
    for (const k of ['blocks', 'held', 'cached', 'free', 'quarantined']) s[k] += c.pool[k];
    for (const t of c.tiers || []) { const x = s.tiers.get(t.tier) || { units: 0, room: 0, bytes: 0 }; x.units += t.units; x.room += t.capacity_units || 0; x.bytes += t.units * (t.unit_bytes || 0); s.tiers.set(t.tier, x); }
  }
  for (const r of Object.values(store.rates)) { s.sent += r.sent; s.stored += r.stored; }
  return s;
}

function stack(pool) {
  const part = (n, cls) => n ? el('i', { class: cls, style: { width: 100 * n / pool.blocks + '%' } }) : null;
  const words = `${pool.held} held, ${pool.cached} cached, ${pool.free} free, ${pool.quarantined} quarantined`;
  return el('div', { class: 'bar', role: 'img', 'aria-label': words, title: words }, part(pool.held, 'b-held'), part(pool.cached, 'b-cached'), part(pool.quarantined, 'b-quarantined'));
}
const tier = (r, name) => (r.c.tiers || []).find(t => t.tier === name);
const tierWords = t => t ? `${count(t.units)} of ${count(t.capacity_units || 0)} units` : '–';

export function make() {
  tiles = {};
  const tile = (k, name) => { tiles[k] = el('dd', {}, el('span', {}, '–'), el('small', {})); return el('div', { class: 'tile' }, el('dt', {}, name), tiles[k]); };
  table = new Table('KV of each worker', [
    { name: 'worker', of: r => r.id, size: 'minmax(6.5rem,1fr)' },
    { name: 'pool', of: r => r.c.pool ? stack(r.c.pool) : r.c.error ? r.c.error.message : '–', size: 'minmax(6rem,1.4fr)' },
    { name: 'hits', of: r => r.c.pool && r.c.pool.asked_tokens ? share(r.c.pool.hit_tokens / r.c.pool.asked_tokens) : '–', cls: 'right', size: '4rem' },
    { name: 'evicted', of: r => r.c.pool ? count(r.c.pool.evicted) : '–', cls: 'right mid', size: '5rem' },
    { name: 'host memory', of: r => tierWords(tier(r, 'host')), cls: 'wide', size: 'minmax(8rem,1fr)' },
    { name: 'SSD', of: r => tierWords(tier(r, 'ssd')), cls: 'wide', size: 'minmax(7rem,1fr)' },
    { name: 'sends', of: r => speed((store.rates[r.id] || {}).sent || 0), cls: 'right mid', size: '6rem' },
    { name: 'gets', of: r => speed((store.rates[r.id] || {}).stored || 0), cls: 'right mid', size: '6rem' },
  ]);
  pins = el('ul', { class: 'happened' });
  pinned = '';
  askPins();
  const prompt = el('textarea', { id: 'pin-prompt', required: true }), ttl = el('input', { id: 'pin-ttl', type: 'number', min: 1, max: 604800, value: '3600' });
  const form = session.as === 'admin' ? el('form', { onsubmit: e => {
    e.preventDefault();
    sure('Pin this prompt', `Its KV stays in host memory of every worker for ${ttl.value} s, or until you end the pin.`, 'Pin', () => ask('/admin/v1/cache/pin', { method: 'POST', body: { prompt: prompt.value, ttl_s: Number(ttl.value) } }).then(() => { prompt.value = ''; askPins(); return 'Pinned.'; }), false);
  } }, el('label', { for: 'pin-prompt' }, 'Pin a prompt (16 tokens or more)'), prompt, el('div', { class: 'form-row' }, el('div', {}, el('label', { for: 'pin-ttl' }, 'Seconds'), ttl), el('button', { type: 'submit' }, 'Pin …'),
    el('button', { type: 'button', class: 'danger', onclick: () => sure('Flush the cache', 'Every worker forgets every prefix that no request holds, in its pool and its tiers. Prompts are computed again.', 'Flush', () => ask('/admin/v1/cache/flush', { method: 'POST' }).then(() => 'Flushed.')) }, 'Flush all …'))) : null;
  return [el('div', { class: 'head' }, el('h1', {}, 'KV'), el('span', { class: 'dim' }, 'what the workers keep of prompts, so as not to compute it again')),
    el('dl', { class: 'tiles six', style: { margin: 0 } }, tile('hit', 'Prefix hits'), tile('pool', 'Pools'), tile('host', 'Host memory'), tile('ssd', 'SSD'), tile('store', 'Shared store'), tile('moves', 'Prefill to decode')),
    el('section', { class: 'card', 'aria-label': 'Workers' }, table.element),
    el('div', { class: 'two' }, el('section', { class: 'card' }, el('h2', {}, 'Pinned'), pins), form && el('section', { class: 'card', 'aria-label': 'Pin and flush' }, form))];
}

async function askPins() {
  let list;
  try { list = await ask('/admin/v1/cache/pin'); } catch (e) { tell(e.message); return; }
  const by = new Map();
  for (const [id, w] of Object.entries(list)) for (const p of w.pins || []) { const x = by.get(p.id) || { ...p, on: [] }; x.on.push(id); by.set(p.id, x); }
  const key = JSON.stringify([...by.values()]);
  if (key === pinned) return;
  pinned = key;
  pins.replaceChildren(...(by.size ? [...by.values()].map(p => el('li', { style: { gridTemplateColumns: 'minmax(0,1fr) max-content' } }, el('span', {}, el('code', {}, p.id.slice(0, 12)), ` ${many(p.tokens, 'token')}, until ${new Date(p.until).toLocaleTimeString()}, on ${p.on.join(', ')}`),
    session.as === 'admin' && el('button', { class: 'quiet', type: 'button', 'aria-label': 'End pin ' + p.id.slice(0, 12), onclick: () => sure('End the pin', 'Its KV may go when others need the room.', 'End', () => ask('/admin/v1/cache/pin', { method: 'DELETE', body: { id: p.id } }).then(() => { askPins(); return 'Ended.'; })) }, 'End …')))
    : [el('li', { style: { display: 'block' } }, el('span', { class: 'dim' }, 'Nothing is pinned.'))]));
}

let n = 0;
export function update() {
  const s = sums(), say = (k, a, b) => { setText(tiles[k].firstChild, a); setText(tiles[k].lastChild, b); }, h = hitRate();
  say('hit', share(h.rate), h.of);
  say('pool', s.blocks ? share((s.held + s.cached) / s.blocks) : '–', `${count(s.held)} held, ${count(s.cached)} cached of ${count(s.blocks)} blocks`);
  for (const [k, names] of [['host', ['host']], ['ssd', ['ssd']], ['store', ['shared', 'store']]]) {
    const t = names.map(x => s.tiers.get(x)).find(Boolean);
    say(k, t ? bytes(t.bytes) : '–', t ? t.room ? `${share(t.units / t.room)} of ${count(t.room)} units` : many(t.units, 'unit') : 'not used');
  }
  say('moves', speed(Math.max(s.sent, s.stored)), 'KV, all workers');
  const known = new Set(members().map(m => m.id));
  table.set(Object.keys(store.cache).filter(id => known.has(id)).sort((a, b) => inOrder(a, b)).map(id => ({ id, c: store.cache[id] })));
  if (++n % 5 === 0) askPins();
}
