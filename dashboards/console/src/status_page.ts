// The server itself: how it is in one line, its version, its options, and what it refused.
import { api, num } from './api';
import { Openings, fill, focusIn, h, tableHead } from './dom';
import { ago, amountOf, bytes, counted, integer, optionText } from './format';
import type { ServerInfo } from './wire';

const trouble = /refused|dropped|failed|failures|rejected|lost|corrupt|never_stored|suppressed/;
/** In bellwether_degraded{reason=...}. */
const degraded: Record<string, string> = {
  disk: 'the disk is nearly full, so nothing is acknowledged', log: 'its log cannot be written, so nothing is acknowledged',
  database: 'its database cannot be written; alerts wait', gpu: 'the GPU was given up; detectors run on the CPU',
};
const shownReasons = 4;

type Row = [name: string, text: string, exact: string];

function tableRow([name, text, exact]: Row): HTMLElement {
  return h('tr', {}, h('th', { scope: 'row', class: 'wrap' }, h('code', {}, name)),
    h('td', { class: 'right wrap' }, text, exact !== text ? h('span', { class: 'visually-hidden' }, `, exactly ${exact}`) : null));
}

function tableOf(head: string[], rows: Row[]): HTMLElement {
  return h('table', {}, tableHead(head, 1), h('tbody', {}, ...rows.map(tableRow)));
}

/** By name. */
function sorted<T>(values: Record<string, T>): [string, T][] {
  return Object.entries(values).sort(([a], [b]) => (a < b ? -1 : 1));
}

function fact(name: string, value: string, note = ''): HTMLElement {
  return h('div', {}, h('dt', {}, name), h('dd', { class: 'fact' }, value), h('dd', { class: 'note' }, note));
}

function rowOf([name, value]: [string, string]): Row {
  return [name, amountOf(name, num(value)), String(num(value))];
}

/** How the server is: its mood, and a sentence. */
function health({ counters }: ServerInfo): [mood: string, words: string] {
  const of = (name: string) => num(counters[name] ?? 'NaN');
  const reasons = Object.keys(counters).flatMap((name) => {
    const reason = /^bellwether_degraded\{reason=(\w+)\}$/.exec(name)?.[1];
    return reason !== undefined && of(name) > 0 ? [degraded[reason] ?? reason] : [];
  });
  if (reasons.length > 0) return ['critical', `Degraded: ${reasons.join('; ')}.`];
  const free = of('bellwether_store_free_bytes');
  const [streams, waiting] = [of('bellwether_ingest_streams'), of('bellwether_alerts_waiting')];
  const facts = [
    Number.isNaN(streams) ? '' : streams === 0 ? 'no rank sends' : streams === 1 ? 'one rank sends' : `${integer(streams)} ranks send`,
    Number.isNaN(free) ? '' : `${bytes(free)} are free`,
    waiting > 0 ? counted(waiting, 'alert waits to be stored', 'alerts wait to be stored') : '',
  ].filter((words) => words !== '');
  const state = facts.length > 0 ? ` ${facts.join(', ')}.`.replace(/^ (\w)/, (_, first: string) => ` ${first.toUpperCase()}`) : '';
  if (of('bellwether_config_last_reload_successful') === 0) {
    return ['warning', `Works, but the last reload failed: the files of before are in force.${state}`];
  }
  const found = sorted(counters).filter(([name, value]) => trouble.test(name) && num(value) > 0);
  if (found.length === 0) return ['ok', `Healthy: nothing was refused, dropped or failed since the start.${state}`];
  const named = found.slice(0, shownReasons).map(([name]) => name.replace(/^bellwether_/, '').replace(/_total\b/, '').replace(/_/g, ' '));
  const more = found.length > shownReasons ? `, and ${found.length - shownReasons} more` : '';
  return ['warning', `Works, but ${found.length === 1 ? 'a counter' : `${found.length} counters`} of what was refused, dropped or failed ` +
    `${found.length === 1 ? 'is' : 'are'} not zero: ${named.join('; ')}${more}.${state}`];
}

export class StatusPage {
  readonly element: HTMLElement;
  private readonly state = h('p', { class: 'state' }, 'Loading…');
  private readonly health = h('p', { role: 'status', hidden: true });
  private readonly facts = h('dl', { class: 'facts panel' });
  private readonly tables = h('div', { class: 'columns' });
  private readonly openings = new Openings();
  private loaded = false;

  constructor() {
    this.facts.hidden = true;
    const title = h('div', { class: 'title-row' }, h('h1', {}, 'Status of the server'));
    this.element = h('main', { class: 'page' }, title, this.state, this.health, this.facts, this.tables);
  }

  async refresh(): Promise<void> {
    this.draw(await api.info());
    this.loaded = true;
  }

  fail(message: string): void {
    if (!this.loaded) fill(this.state, `Cannot load the status: ${message}`);
  }

  /** Rows that say nothing are folded under their number, in `folded` words. */
  private panel(caption: string, head: string[], rows: Row[], quiet: Row[], folded: string): HTMLElement {
    const words = `${integer(quiet.length)} ${folded}`;
    return h('section', { class: 'panel', 'aria-label': caption }, h('h2', {}, caption),
      rows.length === 0 ? h('p', { class: 'state' }, 'None.') : tableOf(head, rows),
      quiet.length === 0 ? null
        : this.openings.details(caption, false, { class: 'more' }, h('summary', { 'data-focus': caption }, words), tableOf(head, quiet)));
  }

  private draw(info: ServerInfo): void {
    this.state.hidden = true;
    this.facts.hidden = false;
    this.health.hidden = false;
    const [mood, words] = health(info);
    this.health.className = `health ${mood}`;
    if (this.health.textContent !== words) this.health.textContent = words;
    const [backend, ...why] = info.backend.split(':');
    const held = info.partitions.length;
    fill(this.facts,
      fact('Version', info.version, info.revision),
      fact('Detectors on', backend, why.join(':').trim()),
      fact('Started', ago(num(info.started_unix_ns))),
      fact('gRPC', info.grpc_address || '–', info.grpc_version),
      fact('HTTP', info.http_address || '–'),
      fact('Storage', info.storage_path || '–'),
      ...(held > 0 ? [fact('Partitions of the cluster', integer(held))] : []));
    const counters = sorted(info.counters);
    const isZero = ([, value]: [string, unknown]) => num(value as string) === 0;
    const rows = (values: [string, unknown][]) => values.map(([name, value]) => rowOf([name, String(value)]));
    const of = (isTrouble: boolean, zero: boolean) =>
      rows(counters.filter((row) => trouble.test(row[0]) === isTrouble && isZero(row) === zero));
    const options = sorted(info.options).map(([name, value]): Row => [name, optionText(name, value), value]);
    const counted = ['Counter', 'Since the start'];
    const focus = focusIn(this.tables);
    fill(this.tables,
      h('div', { class: 'stack' },
        this.panel('Refused, dropped and failed', counted, of(true, false), of(true, true), 'counters at zero'),
        this.panel('Limits', ['Limit', 'At most'], rows(sorted(info.limits)), [], '')),
      h('div', { class: 'stack' },
        this.panel('Options in force', ['Option', 'Value'], options.filter(([, , value]) => value !== ''),
          options.filter(([, , value]) => value === ''), 'options that are not set'),
        this.panel('Counters', counted, of(false, false), of(false, true), 'counters at zero')));
    focus();
  }
}
