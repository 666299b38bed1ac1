// Signs in, and shows the view that the address names.
import { $, ask, el, session, setText, span, tell, Refused } from './base.js';
import { members, poll, problems, store } from './store.js';
import * as overview from './overview.js';
import * as fleet from './fleet.js';
import * as requests from './requests.js';
import * as kv from './kv.js';
import * as events from './events.js';
import * as tryit from './try.js';

const views = { overview, fleet, requests, kv, events, try: tryit };
let view, timer;

// Light or dark: what the system says, or what was chosen here.
const dark = matchMedia('(prefers-color-scheme: dark)');
function paint() {
  const theme = localStorage.getItem('xpyd-theme') || (dark.matches ? 'dark' : 'light');
  document.documentElement.dataset.theme = theme;
  setText($('theme'), theme === 'dark' ? '☀' : '☾');
  if (view && views[view].painted) views[view].painted();
}
dark.addEventListener('change', paint);
$('theme').addEventListener('click', () => {
  localStorage.setItem('xpyd-theme', document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark');
  paint();
});

function route() {
  if (!session.as) return;
  const name = location.hash.slice(1).split('/')[0];
  const next = Object.hasOwn(views, name) ? name : 'overview';
  for (const a of document.querySelectorAll('nav a')) {
    if (a.hash === '#' + next) { a.setAttribute('aria-current', 'page'); a.scrollIntoView({ block: 'nearest', inline: 'nearest' }); } else a.removeAttribute('aria-current');
  }
  if (next === view) return;
  if (view && views[view].leave) views[view].leave();
  const first = !view;
  view = next;
  document.title = views[view].title + ' · xpyd';
  $('main').replaceChildren(...views[view].make());
  views[view].update();
  if (!first) { scrollTo(0, 0); const h = $('main').querySelector('h1'); h.tabIndex = -1; h.focus(); }
  run();
}
addEventListener('hashchange', route);

function says() {
  const list = problems(), key = JSON.stringify(list.map(p => p.level + p.text.replace(/\d+/g, '#'))), box = $('says');
  box.hidden = !list.length;
  if (box.dataset.key !== key) { // a screen reader hears of new problems, and not of each second
    box.dataset.key = key;
    box.replaceChildren(el('ul', {}, list.map(p => el('li', { class: p.level }, p.text))));
  } else [...box.querySelectorAll('li')].forEach((li, i) => setText(li, list[i].text));
  const n = members().filter(m => m.state === 'live').length, worst = list[0] && list[0].level;
  const pill = $('state');
  pill.className = 'pill ' + (worst || 'good');
  setText(pill, store.error ? '✕ no answer' : worst === 'bad' ? '✕ trouble' : worst ? '▲ look' : store.fleet ? `● ${n} live` : '…');
  document.body.classList.toggle('stale', Boolean(store.error) && store.heard > 0);
}

async function run() {
  clearTimeout(timer);
  if (!session.as) return;
  if (!document.hidden) {
    await poll(view);
    if (!session.as) return;
    says();
    await new Promise(done => setTimeout(done)); // so that no task is long
    if (session.as) views[view].update();
  }
  clearTimeout(timer);
  timer = setTimeout(run, 1000);
}
document.addEventListener('visibilitychange', () => { if (!document.hidden) run(); });

function signedOut(why) {
  session.forget();
  clearTimeout(timer);
  if (view && views[view].leave) views[view].leave();
  view = undefined;
  $('top').hidden = $('says').hidden = true;
  if ($('dialog').open) $('dialog').close();
  document.body.classList.remove('stale');
  document.title = 'Sign in · xpyd';
  const token = el('input', { id: 'token', type: 'password', autocomplete: 'current-password', required: true, spellcheck: false, 'aria-describedby': 'hint' });
  const wrong = el('div', { role: 'alert', class: 'bad' }, why || '');
  const go = el('button', { type: 'submit' }, 'Sign in');
  $('main').replaceChildren(el('div', { class: 'card signin' }, el('img', { src: '/dashboard/icon.svg', width: 44, height: 44, alt: '' }), el('h1', {}, 'Sign in to xpyd'),
    el('form', { method: 'post', onsubmit: async e => {
      e.preventDefault();
      go.disabled = true;
      try {
        const s = await ask('/dashboard/session', { method: 'POST', body: { token: token.value } });
        token.value = '';
        session.keep(s.key);
        await enter();
      } catch (e) {
        setText(wrong, e instanceof Refused ? e.message : 'The router does not answer.');
        token.focus();
      }
      go.disabled = false;
    } }, el('div', {}, el('label', { for: 'token' }, 'Admin token'), token,
      el('small', { id: 'hint', class: 'dim' }, 'The text of admin-token in the router’s data folder or, only to look, of admin-token-ro.')), wrong, go)));
  token.focus();
}
addEventListener('signedout', () => { if (session.as) signedOut('You are signed out: the session has ended.'); });
$('leave').addEventListener('click', async () => {
  try { await ask('/dashboard/session', { method: 'DELETE' }); } catch { /* then it ends by itself */ }
  signedOut('');
});

async function enter() {
  const s = await ask('/dashboard/session');
  session.as = s.as;
  $('top').hidden = false;
  document.body.dataset.as = s.as;
  $('leave').title = `Signed in as ${s.as} for another ${span((Date.parse(s.until) - Date.now()) / 1000)}`;
  route();
  if (s.as === 'reader') tell('This token only reads: what changes anything is left out.');
}

$('views').append(...Object.entries(views).map(([name, v]) => el('li', {}, el('a', { href: '#' + name }, v.title))));
paint();
(session.key() ? enter() : Promise.reject(new Error('no key'))).catch(e => signedOut(e instanceof Refused || !session.key() ? '' : 'The router does not answer.'));
