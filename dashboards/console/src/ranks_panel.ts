// Which rank's own gradients stand out: the median of all ranks over steps, and the ranks furthest from it by name.
//
// A run may have thousands of ranks. What is asked for is bounded: some samples of all ranks, spread over
// the run's steps and kept, and the series of the few that stand out.
import { ApiError, api, num, nums } from './api';
import { ChartMarks, Charts, StepWindow } from './charts';
import { fill, h, tableHead } from './dom';
import { counted, integer, number } from './format';
import { middle } from './heatmap';
import type { Run, Series } from './wire';

const norm = 'rank_grad_norm';
const largest = 'rank_grad_norm_max';
const samplesMax = 32;
const atOnce = 4;
const seriesPoints = 600;
const listedMax = 6;
const drawnMax = 3;
/** A rank stands out from here on, as a multiple or a part of the median. */
const farFactor = 1.5;

interface Sample { step: number; values: number[]; median: number }

/** How far a norm is from the median, as a factor of at least one; NaN: it is no number. */
function farness(value: number, median: number): number {
  if (value === median) return 1;
  const factor = value / median;
  return factor < 1 ? 1 / factor : factor;
}

/** Samples of all ranks: the past ones are asked for once. */
class Past {
  private readonly held = new Map<number, Sample | null>();
  private attempt = -1;

  constructor(private readonly run: string) {}

  /** Some of those up to `step`, by their steps. Steps that were asked for are still among them when there are twice as many. */
  async read(step: number, attempt: number): Promise<Sample[]> {
    if (attempt !== this.attempt) this.held.clear();
    this.attempt = attempt;
    let every = 1;
    while (step / every > samplesMax) every *= 2;
    for (const at of this.held.keys()) if (at % every !== 0 || at > step) this.held.delete(at);
    const wanted: number[] = [];
    for (let at = 0; at <= step; at += every) if (!this.held.has(at)) wanted.push(at);
    while (wanted.length > 0) await Promise.all(wanted.splice(0, atOnce).map(async (at) => this.held.set(at, await this.at(at))));
    const found = new Map<number, Sample>();
    for (const sample of this.held.values()) if (sample) found.set(sample.step, sample);
    return [...found.values()].sort((a, b) => a.step - b.step);
  }

  /** The newest sample that is not behind `step`; -1 = of all. */
  async at(step: number): Promise<Sample | null> {
    const matrix = await api.matrix(this.run, norm, step);
    if (matrix.values.length === 0) return null;
    const values = nums(matrix.values);
    return { step: num(matrix.step), values, median: middle(values) };
  }
}

/** Smallest, median and largest of each sample, as a chart draws a series. */
function spread(title: string, samples: Sample[]): Series {
  const known = samples.filter(({ median }) => !Number.isNaN(median));
  const edge = (pick: (a: number, b: number) => number) =>
    known.map(({ values }) => values.reduce((found, value) => (Number.isNaN(value) ? found : pick(found, value))));
  return {
    id: { signal: title, layer: 0, head: 0, name: '' }, step: known.map(({ step }) => String(step)),
    min: edge((a, b) => (a <= b ? a : b)), mean: known.map(({ median }) => median), max: edge((a, b) => (a >= b ? a : b)),
    downsampled: true, values: String(known.length),
  };
}

export class RanksPanel {
  readonly charts: Charts;
  readonly element: HTMLElement;
  private readonly title = h('h2', {}, 'Gradients of single ranks');
  private readonly table = h('div', { class: 'layers' });
  private readonly past: Past;

  constructor(private readonly name: string, zoom: (window: StepWindow | null) => void) {
    this.past = new Past(name);
    this.charts = new Charts(zoom);
    this.charts.element.classList.add('beside');
    this.element = h('section', { class: 'panel', 'aria-label': 'Gradients of single ranks', hidden: true },
      h('div', { class: 'panel-head' }, this.title), this.table, this.charts.legend, this.charts.element);
  }

  /** `step`: that of the map; -1 = the newest. */
  async load(run: Run, step: number, marks: ChartMarks): Promise<void> {
    this.element.hidden = !run.signals.includes(norm);
    if (this.element.hidden) return this.charts.clear();
    try {
      const [now, past] = [await this.past.at(step), await this.past.read(num(run.step), run.description.attempt)];
      this.element.hidden = now === null;
      if (now) await this.draw(run, now, past, marks);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.element.hidden = true;
    }
  }

  private async draw(run: Run, now: Sample, past: Sample[], marks: ChartMarks): Promise<void> {
    const order = now.values.map((value, rank) => ({ rank, value, far: farness(value, now.median) }))
      .filter(({ far }) => !Number.isNaN(far)).sort((a, b) => b.far - a.far);
    const micro = run.signals.includes(largest) ? await api.matrix(this.name, largest, now.step) : null;
    const micros = micro && num(micro.step) === now.step ? nums(micro.values) : [];
    const listed = order.slice(0, listedMax);
    fill(this.title, 'Gradients of single ranks',
      h('span', { class: 'muted small' }, ` step ${integer(now.step)}: ${counted(order.length, 'rank')}, median ${number(now.median)}`));
    const isFar = (rank: number) => past.filter(({ values, median }) => farness(values[rank], median) >= farFactor).length;
    const cell = (x: number | undefined) => h('td', { class: 'right' }, x === undefined || Number.isNaN(x) ? '–' : number(x));
    const rows = listed.map(({ rank, value }) => h('tr', {}, h('td', {}, `rank ${rank}`), cell(value), cell(value / now.median),
      cell(micros[rank]), h('td', { class: isFar(rank) > 0 ? 'right late' : 'right' }, `${isFar(rank)} of ${past.length}`)));
    fill(this.table, this.without(now), h('table', { class: 'worst' },
      h('caption', {}, `Furthest from the median, by factors. Far: in so many samples of the run it was ${farFactor} times the median ` +
        `or more, or as small a part of it.`),
      tableHead(['Rank', 'Norm', 'Over the median', 'Largest micro-batch', 'Far'], 1), h('tbody', {}, ...rows)));
    const drawn = listed.filter(({ far }) => far >= farFactor).slice(0, drawnMax).map(({ rank }) => rank);
    const last = past[past.length - 1]?.step ?? -1;
    const all = spread('Median of all ranks', now.step > last ? [...past, now] : past);
    const series = await this.seriesOf(drawn);
    this.charts.show([all, ...series], marks, series.map(({ id }) => ({ ...all, id })));
  }

  /** Ranks of which nothing is known at that step; NaN may be their norm. */
  private without({ values }: Sample): HTMLElement | null {
    const ranks = values.flatMap((value, rank) => (Number.isNaN(value) ? [rank] : []));
    if (ranks.length === 0) return null;
    const more = ranks.length > listedMax ? ` and ${integer(ranks.length - listedMax)} more` : '';
    return h('p', { class: 'small late' }, `No number: rank ${ranks.slice(0, listedMax).join(', ')}${more}.`);
  }

  /** The drawn ranks', each under its own name. */
  private async seriesOf(ranks: number[]): Promise<Series[]> {
    if (ranks.length === 0) return [];
    const wanted = ranks.map((layer) => ({ signal: norm, layer, head: 0, name: '' }));
    const { series } = await api.series(this.name, wanted, seriesPoints);
    return series.map((one) => ({ ...one, id: { ...one.id, signal: `Rank ${one.id.layer}` } }));
  }
}
