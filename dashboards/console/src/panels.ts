// Panels that are there only where a run has such signals: its optimizer and steps, its experts
// by layer, the losses of its sequences, its reinforcement learning, the gradients of single ranks.
import { isFiring } from './alerts';
import { ApiError, api, num, nums } from './api';
import { ChartMarks, Charts } from './charts';
import { fill, h, tableHead } from './dom';
import { integer, number } from './format';
import { Cell, Heatmap } from './heatmap';
import { RanksPanel } from './ranks_panel';
import { OwnLimits, expertSignalsOf, findSignal, learningOfRun, optimizerNames, ownLimits, sequenceNames } from './signals';
import type { Alert, Event, GetMatrixResponse, Run, Series, SeriesId } from './wire';

/** What the run's page knows when its panels are drawn. */
export interface PanelsView {
  run: Run;
  alerts: Alert[];
  /** The step of the map; -1 = the newest. */
  step: number;
  /** Steps at which actions were applied. */
  actions: number[];
  /** The chosen expert; null = none is. */
  expert: Cell | null;
  /** Experts that a firing alert names. */
  markedExperts: Cell[];
  /** The series of this run, and those of the run beside. */
  series: (wanted: SeriesId[]) => Promise<[Series[], Series[]]>;
}

const sequenceWords = 'largest losses of sequences: ';
const eventPagesMax = 20;

/** Losses and ids, from the words of an event: "12.3 af01, 9.1 77ce"; an id may have commas. */
function lossesOf(words: string): [loss: string, id: string][] {
  const found: [string, string][] = [];
  for (const piece of words.split(', ')) {
    const [, loss, id] = /^([-+.\deinfa]+)(?: (.*))?$/.exec(piece) ?? [];
    const isLoss = loss !== undefined && (Number.isFinite(Number(loss)) || /^[-+]?(nan|inf)$/.test(loss));
    if (isLoss) found.push([loss, id ?? '']);
    else if (found.length > 0) found[found.length - 1][1] += `, ${piece}`;
  }
  return found;
}

/** The newest event of a run that names its largest losses; of several ranks' the largest. */
class LargestLosses {
  private after = '0';
  newest: Event | null = null;

  constructor(private readonly run: string) {}

  /** Pages of events that were whole before are not asked for again. */
  async read(): Promise<void> {
    for (let page = 0; page < eventPagesMax; page++) {
      const { events, next_after } = await api.events(this.run, this.after);
      for (const event of events) this.take(event);
      if (num(next_after) === 0) return;
      this.after = next_after;
    }
  }

  private take(event: Event): void {
    if (event.kind !== 'EVENT_KIND_ANNOTATION' || !event.text.startsWith(sequenceWords)) return;
    const before = this.newest;
    const isSmaller = before?.step === event.step && before.attempt === event.attempt && num(event.value) < num(before.value);
    if (!isSmaller) this.newest = event;
  }
}

/** A panel of charts side by side. */
class ChartPanel {
  readonly charts = new Charts();
  readonly title: HTMLElement;
  readonly element: HTMLElement;

  constructor(title: string, ...above: HTMLElement[]) {
    this.title = h('h2', {}, title);
    this.charts.element.classList.add('beside');
    this.element = h('section', { class: 'panel', 'aria-label': title, hidden: true },
      h('div', { class: 'panel-head' }, this.title), ...above, this.charts.element);
  }

  draw(names: string[], [all, beside]: [Series[], Series[]], marks: ChartMarks): void {
    const of = (series: Series[]) => names.flatMap((name) => series.filter((s) => s.id.signal === name));
    this.element.hidden = names.length === 0;
    if (names.length > 0) this.charts.show(of(all), marks, of(beside));
    else this.charts.clear();
  }
}

const expertName = 'expert_share';

/** What a row of the experts' table is made of: the values of a layer that has a router. */
interface LayerOfExperts { layer: number; largest: number; busiest: number; smallest: number; dead: number; entropy: number; logit: number }

export class Panels {
  readonly element: HTMLElement;
  private readonly optimizer = new ChartPanel('Optimizer and steps');
  private readonly largest = h('div', { class: 'largest' });
  private readonly sequences = new ChartPanel('Losses of sequences', this.largest);
  private readonly learning = new ChartPanel('Reinforcement learning');
  private readonly heatmap: Heatmap;
  private readonly layers = h('div', { class: 'layers' });
  private readonly expertsTitle = h('h2', {}, 'Experts by layer');
  private readonly experts: HTMLElement;
  private readonly losses: LargestLosses;
  private readonly ranks: RanksPanel;

  /** `choose`: an expert was chosen. */
  constructor(private readonly name: string, private readonly choose: (signal: string, cell: Cell) => void) {
    this.losses = new LargestLosses(name);
    this.ranks = new RanksPanel(name);
    this.heatmap = new Heatmap((cell) => choose(expertName, cell), 'expert-cell', 'The map of experts');
    this.experts = h('section', { class: 'panel', 'aria-label': 'Experts', hidden: true },
      h('div', { class: 'panel-head' }, this.expertsTitle), h('div', { class: 'columns' }, this.heatmap.element, this.layers));
    this.element = h('div', { class: 'stack' },
      this.ranks.element, this.experts, this.optimizer.element, this.sequences.element, this.learning.element);
  }

  private all(): Charts[] {
    return [this.ranks, this.optimizer, this.sequences, this.learning].map(({ charts }) => charts);
  }

  async load(view: PanelsView): Promise<void> {
    const { run } = view;
    const own = learningOfRun(run);
    const panels: [ChartPanel, string[]][] = [
      [this.optimizer, optimizerNames(run)], [this.sequences, sequenceNames(run)], [this.learning, own.map(({ name }) => name)],
    ];
    await this.ranks.load(run, view.step, this.marks(view, [], new Map()));
    await this.drawExperts(view);
    const wanted = panels.flatMap(([, names]) => names).map((signal) => ({ signal, layer: 0, head: 0, name: '' }));
    const found: [Series[], Series[]] = wanted.length > 0 ? await view.series(wanted) : [[], []];
    const limits = new Map(own.map((one) => [one.name, ownLimits(one)]));
    for (const [panel, names] of panels) panel.draw(names, found, this.marks(view, names, limits));
    await this.drawLargest(sequenceNames(run).length > 0);
  }

  private marks({ alerts, actions, step }: PanelsView, names: string[], limits: Map<string, OwnLimits>): ChartMarks {
    const thresholds = new Map([...limits].map(([name, of]) => [name, [...of.limits]]));
    const begins = new Set<number>();
    for (const alert of alerts) {
      for (const { signal, text, threshold } of alert.last.evidence) {
        // Evidence on a signal of the job's own has its name in its text.
        const named = names.find((name) => name === signal || name === text);
        if (named === undefined) continue;
        thresholds.set(named, [...(thresholds.get(named) ?? []), num(threshold)].filter(Number.isFinite));
        if (isFiring(alert)) begins.add(num(alert.last.first_step));
      }
    }
    const notes = new Map([...limits].map(([name, { words }]) => [name, words]));
    return { thresholds, notes, begins: [...begins], step, actions, lost: null };
  }

  /** The slider moved. */
  mark(step: number): void {
    for (const charts of this.all()) charts.mark(step);
  }

  private async drawLargest(wanted: boolean): Promise<void> {
    if (!wanted) return;
    try {
      await this.losses.read();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      return;  // A server of before, or one that refuses: the charts say what there is.
    }
    const event = this.losses.newest;
    if (!event) return fill(this.largest, h('p', { class: 'muted small' }, 'No event has named a sequence so far.'));
    const rows = lossesOf(event.text.slice(sequenceWords.length)).map(([loss, id]) =>
      h('tr', {}, h('td', {}, loss), h('td', { class: 'wrap' }, id ? h('code', {}, id) : 'no id')));
    fill(this.largest, h('table', { class: 'worst' },
      h('caption', {}, `Largest losses of sequences, as of the newest event, step ${integer(num(event.step))}`),
      tableHead(['Loss', 'Id']), h('tbody', {}, ...rows)));
  }

  private async drawExperts(view: PanelsView): Promise<void> {
    const has = new Set(expertSignalsOf(view.run).map((s) => s.name));
    this.experts.hidden = !has.has(expertName);
    if (this.experts.hidden) return;
    const ask = async (name: string, step: number) => (has.has(name) ? api.matrix(this.name, name, step) : null);
    let matrices: (GetMatrixResponse | null)[];
    try {
      const first = await api.matrix(this.name, expertName, view.step);
      const step = first.values.length > 0 ? num(first.step) : view.step;
      matrices = [first, ...(await Promise.all([ask('router_entropy_share', step), ask('router_logit_max', step)]))];
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.experts.hidden = true;
      return;
    }
    const [share, entropy, logit] = matrices;
    this.experts.hidden = !share || share.values.length === 0;
    if (!share || this.experts.hidden) return;
    const [step, values] = [num(share.step), nums(share.values)];
    const map = { signal: findSignal(expertName), kind: 'expert' as const, map: null, layers: share.layers, heads: share.heads };
    this.heatmap.show({ ...map, values, step, marked: view.markedExperts }, view.expert);
    fill(this.expertsTitle, 'Experts by layer', h('span', { class: 'muted small' }, ` step ${integer(step)}`));
    fill(this.layers, this.table(this.rowsOf(share, values, entropy, logit)));
  }

  private rowsOf(
    { layers, heads }: GetMatrixResponse, values: number[], entropy: GetMatrixResponse | null, logit: GetMatrixResponse | null,
  ): LayerOfExperts[] {
    const rows: LayerOfExperts[] = [];
    for (let layer = 0; layer < layers; layer++) {
      const all = values.slice(layer * heads, (layer + 1) * heads);
      const known = all.filter((value) => !Number.isNaN(value));
      if (known.length === 0) continue;  // No router, or it was not measured.
      const largest = Math.max(...known);
      const dead = known.filter((value) => value === 0).length;
      const of = (matrix: GetMatrixResponse | null) => num(matrix?.values[layer] ?? 'NaN');
      const shares = { largest, busiest: all.indexOf(largest), smallest: Math.min(...known), dead };
      rows.push({ layer, ...shares, entropy: of(entropy), logit: of(logit) });
    }
    return rows;
  }

  private table(rows: LayerOfExperts[]): HTMLElement {
    const value = (x: number) => h('td', { class: 'right' }, Number.isNaN(x) ? '–' : number(x));
    const show = ({ layer, busiest }: LayerOfExperts) => h('button', {
      class: 'link', 'aria-label': `Show the busiest expert of layer ${layer}`,
      onclick: () => this.choose(expertName, { layer, head: busiest }),
    }, String(layer));
    const line = (row: LayerOfExperts) => h('tr', {}, h('td', {}, show(row)), value(row.largest), value(row.smallest),
      h('td', { class: row.dead > 0 ? 'right late' : 'right' }, String(row.dead)), value(row.entropy), value(row.logit));
    return h('table', { class: 'worst' },
      h('caption', {}, 'Shares are over a balanced load, the entropy over its largest. Dead: chosen for no token.'),
      tableHead(['Layer', 'Largest share', 'Smallest share', 'Dead', 'Entropy', 'Largest logit'], 1),
      h('tbody', {}, ...rows.map(line)));
  }

  redraw(): void {
    this.heatmap.redraw();
    for (const charts of this.all()) charts.clear();
  }
}
