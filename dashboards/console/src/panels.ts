// Panels that are there only where a run has such signals: its optimizer and steps, its experts
// by layer, the losses of its sequences, its reinforcement learning, the gradients of single ranks.
import { isFiring, toldThreshold } from './alerts';
import { ApiError, api, num, nums } from './api';
import { ChartMarks, Charts, StepWindow } from './charts';
import { fill, h, tableHead } from './dom';
import { integer, number } from './format';
import { Cell, Heatmap } from './heatmap';
import { RanksPanel } from './ranks_panel';
import { Moment, RunEvents, sequenceWords } from './run_events';
import { OwnLimits, expertSignalsOf, findSignal, learningOfRun, optimizerNames, ownLimits, sequenceNames } from './signals';
import { term } from './terms';
import type { Alert, GetMatrixResponse, Run, Series, SeriesId } from './wire';

/** What the run's page knows when its panels are drawn. */
export interface PanelsView {
  run: Run;
  alerts: Alert[];
  /** The step of the map; -1 = the newest. */
  step: number;
  /** Where actions were applied. */
  actions: Moment[];
  events: RunEvents;
  /** The steps that charts show; null = all. */
  window: StepWindow | null;
  /** The chosen expert; null = none is. */
  expert: Cell | null;
  /** Experts that a firing alert names. */
  markedExperts: Cell[];
  /** The series of this run, and those of the run beside. */
  series: (wanted: SeriesId[]) => Promise<[Series[], Series[]]>;
}

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

/** A panel of charts side by side. */
class ChartPanel {
  readonly charts: Charts;
  readonly title: HTMLElement;
  readonly element: HTMLElement;

  constructor(title: string, zoom: (window: StepWindow | null) => void, ...above: HTMLElement[]) {
    this.charts = new Charts(zoom);
    this.title = h('h2', {}, title);
    this.charts.element.classList.add('beside');
    this.element = h('section', { class: 'panel', 'aria-label': title, hidden: true },
      h('div', { class: 'panel-head' }, this.title), ...above, this.charts.legend, this.charts.element);
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
  private readonly optimizer: ChartPanel;
  private readonly largest = h('div', { class: 'largest' });
  private readonly sequences: ChartPanel;
  private readonly learning: ChartPanel;
  private readonly heatmap: Heatmap;
  private readonly layers = h('div', { class: 'layers' });
  private readonly expertsTitle = h('h2', {}, 'Experts by layer');
  private readonly experts: HTMLElement;
  private readonly ranks: RanksPanel;

  /** `choose`: an expert was chosen. `zoom`: other steps are wanted in charts. */
  constructor(
    private readonly name: string, private readonly choose: (signal: string, cell: Cell) => void,
    zoom: (window: StepWindow | null) => void,
  ) {
    this.optimizer = new ChartPanel('Optimizer and steps', zoom);
    this.sequences = new ChartPanel('Losses of sequences', zoom, this.largest);
    this.learning = new ChartPanel('Reinforcement learning', zoom);
    this.learning.title.append(term('own-signal', 'panel'));
    this.ranks = new RanksPanel(name, zoom);
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
    if (sequenceNames(run).length > 0) this.drawLargest(view.events);
  }

  private marks({ alerts, actions, events, step, window }: PanelsView, names: string[], limits: Map<string, OwnLimits>): ChartMarks {
    const thresholds = new Map([...limits].map(([name, of]) => [name, [...of.limits]]));
    const begins = new Map<number, Moment>();
    for (const alert of alerts) {
      for (const { signal, text, threshold } of alert.last.evidence) {
        // Evidence on a signal of the job's own has its name in its text.
        const named = names.find((name) => name === signal || name === text);
        if (named === undefined) continue;
        thresholds.set(named, [...(thresholds.get(named) ?? []), num(threshold)].filter(Number.isFinite));
        const first = num(alert.last.first_step);
        if (isFiring(alert)) begins.set(first, { step: first, label: `alert: ${alert.last.rule}` });
      }
    }
    const notes = new Map([...limits].map(([name, { words }]) => [name, words]));
    const declared = new Map([...limits].map(([name, { low, high }]) => [name, { low, high }]));
    return { thresholds, notes, declared, begins: [...begins.values()], step, actions, events: events.moments, window, lost: null };
  }

  /** The slider moved. */
  mark(step: number): void {
    for (const charts of this.all()) charts.mark(step);
  }

  private drawLargest({ largest: event }: RunEvents): void {
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
    const anchor = toldThreshold(view.alerts, expertName) ?? map.signal.anchor ?? 0;
    this.heatmap.show({ ...map, values, step, marked: view.markedExperts }, view.expert, anchor);
    fill(this.expertsTitle, 'Experts by layer', h('span', { class: 'muted small' }, ` step ${integer(step)}`));
    fill(this.layers, this.table(this.rowsOf(share, values, entropy, logit), anchor));
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

  private table(rows: LayerOfExperts[], least: number): HTMLElement {
    const value = (x: number, late = false) => h('td', { class: late ? 'right late' : 'right' }, Number.isNaN(x) ? '–' : number(x));
    const show = ({ layer, busiest }: LayerOfExperts) => h('button', {
      class: 'link', 'aria-label': `Show the busiest expert of layer ${layer}`,
      onclick: () => this.choose(expertName, { layer, head: busiest }),
    }, String(layer));
    const line = (row: LayerOfExperts) => h('tr', {}, h('td', {}, show(row)), value(row.largest), value(row.smallest, row.smallest < least),
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
