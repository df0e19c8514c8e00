// The server itself: what it is, what it was told, what it refused.
import { api, num } from './api';
import { fill, h } from './dom';
import { ago, integer, number } from './format';
import type { ServerInfo } from './wire';

const trouble = /refused|dropped|failed|rejected|lost|corrupt/;

function table(caption: string, head: string[], rows: [string, string][]): HTMLElement {
  return h('section', { class: 'panel', 'aria-label': caption }, h('h2', {}, caption),
    rows.length === 0 ? h('p', { class: 'state' }, 'None.') : h('table', {},
      h('thead', {}, h('tr', {}, ...head.map((t, i) => h('th', { scope: 'col', class: i > 0 ? 'right' : '' }, t)))),
      h('tbody', {}, ...rows.map(([name, value]) => h('tr', {}, h('th', { scope: 'row' }, h('code', {}, name)), h('td', { class: 'right wrap' }, value))))));
}

function amount(value: number): string {
  return Number.isInteger(value) ? integer(value) : number(value);
}

export class StatusPage {
  readonly element: HTMLElement;
  private readonly state = h('p', { class: 'state' }, 'Loading…');
  private readonly facts = h('dl', { class: 'facts panel' });
  private readonly tables = h('div', { class: 'columns' });
  private loaded = false;

  constructor() {
    this.facts.hidden = true;
    this.element = h('main', { class: 'page' }, h('div', { class: 'title-row' }, h('h1', {}, 'Status of the server')), this.state, this.facts, this.tables);
  }

  async refresh(): Promise<void> {
    this.draw(await api.info());
    this.loaded = true;
  }

  fail(message: string): void {
    if (!this.loaded) fill(this.state, `Cannot load the status: ${message}`);
  }

  private draw(info: ServerInfo): void {
    this.state.hidden = true;
    this.facts.hidden = false;
    const fact = (name: string, value: string, note = '') => h('div', {}, h('dt', {}, name), h('dd', { class: 'fact' }, value), h('dd', { class: 'note' }, note));
    fill(this.facts, fact('Version', info.version, info.revision), fact('Detectors on', info.backend.split(':')[0], info.backend.split(':').slice(1).join(':').trim()),
      fact('Started', ago(num(info.started_unix_ns))), fact('gRPC', info.grpc_address || '–', info.grpc_version), fact('HTTP', info.http_address || '–'),
      fact('Storage', info.storage_path || '–'));
    const counters = Object.entries(info.counters).map(([name, value]): [string, number] => [name, num(value)]).sort(([a], [b]) => (a < b ? -1 : 1));
    const text = (rows: [string, number][]) => rows.map(([name, value]): [string, string] => [name, amount(value)]);
    const refused = counters.filter(([name, value]) => trouble.test(name) && value > 0);
    fill(this.tables, h('div', { class: 'stack' }, table('Refused, dropped and failed', ['Counter', 'Since the start'], text(refused)),
      table('Limits', ['Limit', 'At most'], text(Object.entries(info.limits).map(([n, v]): [string, number] => [n, num(v)]).sort(([a], [b]) => (a < b ? -1 : 1))))),
    h('div', { class: 'stack' }, table('Options in force', ['Option', 'Value'], Object.entries(info.options).sort(([a], [b]) => (a < b ? -1 : 1))),
      table('Counters', ['Counter', 'Since the start'], text(counters.filter(([name]) => !trouble.test(name))))));
  }
}
