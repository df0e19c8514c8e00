// The server itself: its version, its options, and what it refused.
import { api, num } from './api';
import { fill, h, tableHead } from './dom';
import { ago, integer, number } from './format';
import type { Real, ServerInfo } from './wire';

const trouble = /refused|dropped|failed|rejected|lost|corrupt/;

function tableRow([name, value]: [string, string]): HTMLElement {
  return h('tr', {}, h('th', { scope: 'row' }, h('code', {}, name)), h('td', { class: 'right wrap' }, value));
}

function table(caption: string, head: string[], rows: [string, string][]): HTMLElement {
  const content = rows.length === 0 ? h('p', { class: 'state' }, 'None.')
    : h('table', {}, tableHead(head, 1), h('tbody', {}, ...rows.map(tableRow)));
  return h('section', { class: 'panel', 'aria-label': caption }, h('h2', {}, caption), content);
}

function amount(value: number): string {
  return Number.isInteger(value) ? integer(value) : number(value);
}

/** By name. */
function sorted<T>(values: Record<string, T>): [string, T][] {
  return Object.entries(values).sort(([a], [b]) => (a < b ? -1 : 1));
}

function amounts(rows: [string, Real][]): [string, string][] {
  return rows.map(([name, value]) => [name, amount(num(value))]);
}

function fact(name: string, value: string, note = ''): HTMLElement {
  return h('div', {}, h('dt', {}, name), h('dd', { class: 'fact' }, value), h('dd', { class: 'note' }, note));
}

export class StatusPage {
  readonly element: HTMLElement;
  private readonly state = h('p', { class: 'state' }, 'Loading…');
  private readonly facts = h('dl', { class: 'facts panel' });
  private readonly tables = h('div', { class: 'columns' });
  private loaded = false;

  constructor() {
    this.facts.hidden = true;
    const title = h('div', { class: 'title-row' }, h('h1', {}, 'Status of the server'));
    this.element = h('main', { class: 'page' }, title, this.state, this.facts, this.tables);
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
    const [backend, ...why] = info.backend.split(':');
    fill(this.facts,
      fact('Version', info.version, info.revision),
      fact('Detectors on', backend, why.join(':').trim()),
      fact('Started', ago(num(info.started_unix_ns))),
      fact('gRPC', info.grpc_address || '–', info.grpc_version),
      fact('HTTP', info.http_address || '–'),
      fact('Storage', info.storage_path || '–'));
    const counters = sorted(info.counters);
    const refused = counters.filter(([name, value]) => trouble.test(name) && num(value) > 0);
    const others = counters.filter(([name]) => !trouble.test(name));
    const counted = ['Counter', 'Since the start'];
    fill(this.tables,
      h('div', { class: 'stack' },
        table('Refused, dropped and failed', counted, amounts(refused)),
        table('Limits', ['Limit', 'At most'], amounts(sorted(info.limits)))),
      h('div', { class: 'stack' },
        table('Options in force', ['Option', 'Value'], sorted(info.options)),
        table('Counters', counted, amounts(others))));
  }
}
