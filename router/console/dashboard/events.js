// Events: what happened, the newest first, and what the planner thinks.
import { clock, count, el, many, setText, share } from './base.js';
import { store } from './store.js';

export const title = 'Events';
let list, kind, search, drawn = '', planner, found;
const mark = { good: '●', info: '○', warn: '▲', bad: '✕' };

export function make() {
  drawn = '';
  kind = el('select', { id: 'kind', onchange: update }, [['', 'all'], ['trouble', 'trouble'], ['fleet', 'fleet'], ['request', 'requests'], ['order', 'orders and reloads']].map(([v, t]) => el('option', { value: v }, t)));
  search = el('input', { type: 'search', id: 'find', oninput: update });
  list = el('ul', { class: 'happened' });
  planner = el('section', { class: 'card', 'aria-label': 'Planner' });
  found = el('span', { class: 'dim' });
  return [el('div', { class: 'head' }, el('h1', {}, 'Events'), found), planner,
    el('section', { class: 'card', 'aria-label': 'List of events' }, el('div', { class: 'filters' }, el('div', {}, el('label', { for: 'find' }, 'Search'), search), el('div', {}, el('label', { for: 'kind' }, 'Show'), kind)), list)];
}

export function update() {
  const text = search.value.trim().toLowerCase(), k = kind.value;
  const rows = store.events.filter(e => (!k || e.kind === k || k === 'trouble' && (e.level === 'bad' || e.level === 'warn')) && (!text || `${e.who || ''} ${e.text}`.toLowerCase().includes(text))).slice(-300).reverse();
  const key = k + '|' + text + '|' + store.nextEvent;
  if (key !== drawn) {
    drawn = key;
    list.replaceChildren(...(rows.length ? rows.map(e => el('li', {}, el('time', { class: 'num dim', dateTime: e.at, title: new Date(e.at).toLocaleString() }, clock(e.at)), el('span', { class: e.level, role: 'img', 'aria-label': e.level }, mark[e.level]), el('span', {}, e.who && el('b', {}, e.who + ' '), e.text.replace('POST /dashboard/session', 'signs in here').replace('DELETE /dashboard/session', 'signs out here')))) : [el('li', { style: { display: 'block' } }, el('span', { class: 'dim' }, 'None like this.'))]));
    setText(found, `${many(store.events.length, 'event')} since this router began, at most the last 1000`);
  }
  plans();
}

let planned = '';
function plans() {
  const p = store.planner;
  planner.hidden = !p || p.mode === 'off';
  if (planner.hidden) return;
  const key = JSON.stringify(p);
  if (key === planned && planner.childElementCount) return;
  planned = key;
  const out = [el('h2', {}, `Planner: ${p.mode}`)];
  if (!p.leads) out.push(el('p', { class: 'dim' }, 'It has decided nothing yet, or another router plans.'));
  for (const [model, m] of Object.entries(p.models || {})) {
    for (const r of m.roles || []) out.push(el('div', {}, `${model} ${r.role}: ${r.have} there, ${r.wanted} wanted, ${r.need.toFixed(1)} needed; ${count(r.now.load)} tokens a second, ${share(r.now.utilisation)} used`));
    for (const d of (m.decisions || []).slice(-5).reverse()) out.push(el('div', { class: 'dim' }, `${clock(d.at)} ${d.kind} ${d.n} ${d.role}${d.worker ? ' (' + d.worker + ')' : ''}: ${d.reason}`));
  }
  planner.replaceChildren(...out);
}
