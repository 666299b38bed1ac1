// What all views use: elements, numbers in words, what is asked of the router, and its answers.
// What workers and clients say is text: it is only ever put into textContent.

const svgNames = new Set(['svg', 'g', 'rect', 'path', 'text', 'circle', 'defs', 'pattern', 'title', 'line']);

// el makes an element. Of its attributes "on…" are listeners, "class" and what begins with data, aria or role are
// attributes, and the rest are properties; style is an object.
export function el(tag, attrs = {}, ...inside) {
  const svg = svgNames.has(tag), e = svg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [k, v] of Object.entries(attrs || {})) {
    if (v === undefined || v === null || v === false) continue;
    if (k.startsWith('on')) e.addEventListener(k.slice(2), v);
    else if (k === 'style') Object.assign(e.style, v);
    else if (svg || k === 'class' || k === 'for' || k === 'colspan' || /^(data|aria|role|tabindex)/.test(k)) e.setAttribute(k, v === true ? '' : v);
    else e[k] = v;
  }
  e.append(...inside.flat().filter(x => x !== null && x !== undefined && x !== false));
  return e;
}
export const $ = id => document.getElementById(id);
export function setText(e, text) { if (e.textContent !== text) e.textContent = text; }

// Numbers in words.
export const time = s => !(s > 0) ? '–' : s < .001 ? (s * 1e6).toFixed(0) + ' µs' : s < 1 ? (s * 1e3).toFixed(s < .01 ? 1 : 0) + ' ms' : s < 120 ? s.toFixed(s < 10 ? 2 : 0) + ' s' : Math.round(s / 60) + ' min';
export const ms = n => n > 0 ? time(n / 1000) : '–';
export const bytes = n => n >= 2 ** 30 ? (n / 2 ** 30).toFixed(1) + ' GiB' : n >= 2 ** 20 ? (n / 2 ** 20).toFixed(n < 2 ** 24 ? 1 : 0) + ' MiB' : n >= 1024 ? Math.round(n / 1024) + ' KiB' : Math.round(n) + ' B';
export const speed = n => n >= 1e9 ? (n / 1e9).toFixed(2) + ' GB/s' : n >= 1e6 ? (n / 1e6).toFixed(1) + ' MB/s' : n >= 1e3 ? (n / 1e3).toFixed(0) + ' kB/s' : Math.round(n) + ' B/s';
export const count = n => n >= 1e6 ? (n / 1e6).toFixed(1) + ' M' : n >= 1e4 ? (n / 1e3).toFixed(1) + ' k' : n >= 100 || Number.isInteger(n) ? n.toFixed(0) : n.toFixed(1);
export const share = x => x === null || Number.isNaN(x) ? '–' : (100 * x).toFixed(x > 0 && x < .1 ? 1 : 0) + ' %';
export const span = s => s < 120 ? Math.max(0, Math.round(s)) + ' s' : s < 7200 ? Math.floor(s / 60) + ' min' : s < 172800 ? Math.floor(s / 3600) + ' h' : Math.floor(s / 86400) + ' days';
export const clock = t => new Date(t).toLocaleTimeString([], { hour12: false });
export const inOrder = new Intl.Collator(undefined, { numeric: true }).compare; // of names: decode-2 before decode-10
export const many = (n, what) => n + ' ' + what + (n === 1 ? '' : 's');

// The session: the cookie is the browser's, this key is the page's.
const keyAt = 'xpyd-session-key';
export const session = {
  as: '',
  key: () => localStorage.getItem(keyAt) || '',
  keep(key) { localStorage.setItem(keyAt, key); },
  forget() { localStorage.removeItem(keyAt); this.as = ''; },
};

export class Refused extends Error { constructor(status, text) { super(text); this.status = status; } }

// ask sends a request of the admin API. An answer that is no success is a Refused; none is any other error.
export async function ask(path, { method = 'GET', body, headers = {}, raw = false, signal, timeout = method === 'GET' ? 8000 : 60000 } = {}) {
  const r = await fetch(path, { method, body: body === undefined ? undefined : JSON.stringify(body), cache: 'no-store', credentials: 'same-origin',
    headers: { 'X-Xpyd-Session': session.key(), ...(body === undefined ? {} : { 'Content-Type': 'application/json' }), ...headers }, signal: signal || AbortSignal.timeout(timeout) });
  if (!r.ok) {
    const text = await r.text();
    let says = text.slice(0, 300);
    try { says = JSON.parse(text).error.message; } catch { /* it is no error object */ }
    if (r.status === 401) dispatchEvent(new Event('signedout'));
    throw new Refused(r.status, says || 'status ' + r.status);
  }
  if (raw) return r;
  return r.status === 204 ? null : r.json();
}

// tell says for some seconds what came of an order.
let quiet;
export function tell(text) {
  setText($('told'), text);
  clearTimeout(quiet);
  quiet = setTimeout(() => setText($('told'), ''), 6000);
}

// show opens the dialog with a title and what is inside.
export function show(title, inside, small) {
  const d = $('dialog');
  d.className = small ? 'small' : '';
  d.replaceChildren(el('header', {}, el('h2', { id: 'dialog-title' }, title), el('button', { class: 'quiet', type: 'button', onclick: () => d.close() }, 'Close')), inside);
  if (!d.open) d.showModal();
  return d;
}

// sure asks before something is done, and does it. It reports whether it is done.
export function sure(title, text, label, act, danger = true) {
  return new Promise(done => {
    let did = false;
    const go = el('button', { type: 'button', class: danger ? 'danger' : '', onclick: async () => {
      go.disabled = true;
      try {
        const said = await act();
        did = true;
        tell(typeof said === 'string' ? said : 'Done: ' + title);
      } catch (e) { tell('Refused: ' + e.message); }
      d.close();
    } }, label);
    const d = show(title, el('div', {}, el('p', {}, text), el('div', { class: 'does' }, go, el('button', { class: 'quiet', type: 'button', onclick: () => d.close() }, 'Cancel'))), true);
    d.addEventListener('close', () => done(did), { once: true });
    go.focus();
  });
}

// Table shows any number of rows by making only those in sight. columns: {name, of: row => text or element, size, cls}.
export class Table {
  constructor(label, columns, open) {
    Object.assign(this, { columns, open, rows: [], pool: [], height: 34 });
    const shape = () => columns.filter(c => !(c.cls || '').match(innerWidth <= 560 ? /mid|wide/ : innerWidth <= 900 ? /wide/ : /(?!)/)).map(c => c.size || 'minmax(0,1fr)').join(' ');
    this.shape = shape;
    this.head = el('div', { class: 'headrow', role: 'row' }, columns.map(c => el('span', { role: 'columnheader', class: c.cls || '' }, c.name)));
    this.sizer = el('div', { class: 'sizer' });
    this.view = el('div', { class: 'rows', tabindex: '0', role: 'rowgroup' }, this.sizer);
    this.element = el('div', { class: 'table', role: 'table', 'aria-label': label }, el('div', { role: 'rowgroup' }, this.head), this.view);
    this.view.addEventListener('scroll', () => this.draw(), { passive: true });
    this.watch = new ResizeObserver(() => this.draw(true));
    this.watch.observe(this.view);
  }
  set(rows) {
    this.rows = rows;
    this.element.setAttribute('aria-rowcount', rows.length + 1);
    this.sizer.style.height = rows.length * this.height + 'px';
    this.draw(true);
  }
  draw(all) {
    const first = Math.max(0, Math.floor(this.view.scrollTop / this.height) - 4), n = Math.ceil(this.view.clientHeight / this.height) + 8;
    const shape = this.shape();
    this.head.style.gridTemplateColumns = shape;
    this.head.style.paddingRight = `calc(.4rem + ${this.view.offsetWidth - this.view.clientWidth}px)`;
    while (this.pool.length < n) this.pool.push(this.line());
    for (let k = 0; k < this.pool.length; k++) { // row i is in line i mod the pool's length, so that scrolling changes few
      const p = this.pool.length, i = first + ((k - first) % p + p) % p, line = this.pool[k], row = i < first + n ? this.rows[i] : undefined;
      if (row === undefined) { line.element.hidden = true; line.row = undefined; continue; }
      if (!all && line.row === row && line.at === i) continue;
      line.element.hidden = false;
      line.row = row; line.at = i;
      line.element.style.transform = `translateY(${i * this.height}px)`;
      line.element.style.gridTemplateColumns = shape;
      line.element.setAttribute('aria-rowindex', i + 2);
      this.columns.forEach((c, j) => {
        const value = c.of(row), cell = line.cells[j];
        if (value instanceof Node) cell.replaceChildren(value);
        else setText(j === 0 && line.button ? line.button : cell, value === undefined || value === '' ? '–' : String(value));
        if (c.look) cell.className = [c.cls || '', c.look(row)].join(' ');
      });
    }
  }
  line() {
    const line = {}, open = this.open;
    if (open) line.button = el('button', { class: 'link', type: 'button', onclick: () => open(line.row) });
    line.cells = this.columns.map((c, j) => el('span', { role: 'cell', class: c.cls || '' }, j === 0 && line.button));
    line.element = el('div', { class: 'row', role: 'row', hidden: true }, line.cells);
    this.sizer.append(line.element);
    return line;
  }
}
