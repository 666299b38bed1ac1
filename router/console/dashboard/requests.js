// Requests: those that run and the latest that are over, and where one's time went.
import { Table, ask, clock, el, many, ms, setText, show } from './base.js';
import { store } from './store.js';

export const title = 'Requests';
let table, search, status, found, still;

const statusOf = r => r.over ? r.status >= 500 ? '✕ ' + r.status : r.status >= 400 ? '▲ ' + r.status : r.error ? '✕ broke off' : '✓ ' + r.status : '… ' + r.state;
const look = r => !r.over ? 'dim' : r.status >= 500 || r.status < 400 && r.error ? 'bad' : r.status >= 400 ? 'warn' : 'good';

export function make() {
  search = el('input', { type: 'search', id: 'search', placeholder: 'id, worker, model, path, error', oninput: update });
  status = el('select', { id: 'status', onchange: update }, [['', 'all'], ['run', 'running'], ['ok', 'answered'], ['failed', 'failed'], ['moved', 'tried again or moved']].map(([v, t]) => el('option', { value: v }, t)));
  still = el('input', { type: 'checkbox', id: 'still' });
  still.style.width = 'auto';
  found = el('span', { class: 'dim', role: 'status' });
  table = new Table('Requests', [
    { name: 'request', of: r => r.id, size: 'minmax(6rem,1.5fr)' },
    { name: 'start', of: r => clock(r.start), cls: 'num mid', size: '5rem' },
    { name: 'status', of: statusOf, look, size: '6rem' },
    { name: 'first token', of: r => ms(r.ttft_ms), cls: 'right mid', size: '6rem' },
    { name: 'took', of: r => r.over ? ms(r.took_ms) : '…', cls: 'right', size: '5rem' },
    { name: 'prefill', of: r => r.prefill, cls: 'wide', size: 'minmax(5rem,1fr)' },
    { name: 'decode', of: r => r.decode, cls: 'wide', size: 'minmax(5rem,1fr)' },
    { name: 'tries', of: r => r.attempts || '–', cls: 'right wide', size: '3rem' },
    { name: 'path', of: r => r.path, cls: 'mid', size: 'minmax(6rem,1fr)' },
  ], r => waterfall(r.id));
  return [el('div', { class: 'head' }, el('h1', {}, 'Requests'), found),
    el('section', { class: 'card', 'aria-label': 'List of requests' }, el('div', { class: 'filters' }, el('div', {}, el('label', { for: 'search' }, 'Search'), search), el('div', {}, el('label', { for: 'status' }, 'Show'), status),
      el('label', { for: 'still' }, still, ' stand still')), table.element)];
}

export function update(event) {
  if (still.checked && !event) return;
  const text = search.value.trim().toLowerCase(), kind = status.value, keep = {
    '': () => true, run: r => !r.over, ok: r => r.over && r.status < 400 && !r.error, failed: r => r.over && (r.status >= 400 || r.error), moved: r => r.attempts > 1 }[kind];
  const rows = [];
  for (const r of store.requests.values()) if (keep(r) && (!text || [r.id, r.prefill, r.decode, r.model, r.path, r.error, r.status].some(x => x && String(x).toLowerCase().includes(text)))) rows.push(r);
  rows.sort((a, b) => b.t - a.t);
  table.set(rows);
  setText(found, rows.length ? `${many(rows.length, 'request')}${rows.length < store.requests.size ? ' of ' + store.requests.size : ''}, the newest first` : store.requests.size ? 'none like this' : 'none yet: send one with Try it');
}

const names = { admit: 'waits for a place', pick: 'picks a pair', bring: 'brings KV ahead', prefill: 'prefill', decode: 'decode', first_byte: 'to the first byte', relay: 'tokens to the client' };

async function waterfall(id) {
  let r;
  try { r = await ask('/debug/requests/' + encodeURIComponent(id)); } catch (e) { show('Request', el('p', {}, e.message)); return; }
  const total = Math.max(r.took_ms || 0, ...(r.phases || []).map(p => Math.max(p.start_ms, p.end_ms || 0)), r.took_ms ? 0 : Date.now() - Date.parse(r.start), .001);
  const rows = (r.phases || []).flatMap(p => {
    const end = p.end_ms || total, left = Math.min(99.5, 100 * p.start_ms / total), kind = p.state === 'failed' ? 'failed' : p.name;
    const bar = el('i', { class: kind + (p.end_ms ? '' : ' lasting') });
    bar.style.left = left + '%';
    bar.style.width = Math.max(.4, Math.min(100 - left, 100 * (end - p.start_ms) / total)) + '%';
    return [el('span', {}, (names[p.name] || p.name) + (p.worker ? ' · ' + p.worker : '') + (p.attempt > 1 ? ` (try ${p.attempt})` : '')), el('span', { class: 'track', 'aria-hidden': 'true' }, bar),
      el('span', { class: 'num dim' }, `from ${p.start_ms.toFixed(1)} ms, ${p.end_ms ? ms(end - p.start_ms) : 'still'}`)];
  });
  for (const p of r.pauses || []) {
    const bar = el('i', { class: 'pause' });
    bar.style.left = Math.min(99.5, 100 * p.start_ms / total) + '%';
    bar.style.width = Math.max(.4, 100 * (p.end_ms - p.start_ms) / total) + '%';
    rows.push(el('span', {}, 'no token'), el('span', { class: 'track', 'aria-hidden': 'true' }, bar), el('span', { class: 'num dim' }, `from ${p.start_ms.toFixed(1)} ms, ${ms(p.end_ms - p.start_ms)}`));
  }
  const fact = (k, v) => v ? [el('dt', {}, k), el('dd', {}, v)] : [];
  const attempts = (r.attempts || []).map((a, i) => {
    const out = [el('h2', {}, `Try ${i + 1}: ${a.prefill.id || 'no prefill'} → ${a.decode.id}`)];
    const lines = [a.error && 'It failed: ' + a.error, a.outcome && 'Prefill’s part: ' + a.outcome, a.decode.why && `It moved on from ${a.decode.id}: ${a.decode.why}`];
    const e = a.explain;
    if (e) {
      lines.push(`Picked by ${e.policy}: ${e.reason}`);
      if (e.split) lines.push(`As a pair ${ms(e.split.pair_ms)}, by decode alone ${ms(e.split.local_ms)}${e.split.why ? ': ' + e.split.why : ''}`);
      for (const role of ['prefill', 'decode']) if (e[role] && e[role].length) lines.push(role + ': ' + e[role].map(c => `${c.id} cost ${Number(c.cost.toFixed(3))}, load ${Number(c.load.toFixed(1))}, ${Math.round(100 * c.match)} % cached`).join('; '));
    } else if (!a.error) lines.push('Why this pair: the router keeps that for requests with x-xpyd-explain: 1.');
    out.push(el('ul', {}, lines.filter(Boolean).map(l => el('li', {}, l))));
    return out;
  });
  show('Where the time went', el('div', {}, el('dl', { class: 'facts' }, fact('Request', r.request_id), fact('Asked', `${r.path}${r.model ? ', ' + r.model : ''}${r.stream ? ', as a stream' : ''}`), fact('Began', new Date(r.start).toLocaleString()), fact('State', r.state + (r.status ? ', status ' + r.status : '')), fact('Error', r.error),
    fact('First token', ms(r.ttft_ms)), fact('Took', r.took_ms ? ms(r.took_ms) : 'it runs')), el('div', { class: 'fall' }, rows), ...attempts.flat()));
}
