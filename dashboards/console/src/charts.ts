// Series of one head under each other, cause first, one cursor for all.
import uPlot from 'uplot';
import { fill, h, themeColor } from './dom';
import { bytes, number } from './format';
import { num } from './api';
import { offerCsv, offerPng } from './download';
import type { Moment } from './run_events';
import { findSignal, isWarmBelow, termOf } from './signals';
import { info, oneStop } from './terms';
import type { Real, Series } from './wire';

export interface ChartMarks {
  /** Evidence thresholds and declared limits by signal. */
  thresholds: Map<string, number[]>;
  /** Between which values a signal of the job's own is legal; NaN = no such limit. */
  declared?: Map<string, Bounds>;
  /** Words beside a signal's title. */
  notes?: Map<string, string>;
  /** Where alerts began. */
  begins: Moment[];
  /** The step of the heatmap. */
  step: number;
  /** Where actions were applied. */
  actions: Moment[];
  /** What the job has told of itself. */
  events: Moment[];
  /** The steps that are shown; null = all. */
  window: StepWindow | null;
  /** Between which steps the run is expected to be lost, and when most likely; null = not known. */
  lost: { low: number; middle: number; high: number } | null;
}

/** What lies below `low` or above `high` is beyond its threshold, as on the map; NaN = no such limit. */
export interface Bounds { low: number; high: number }

export interface StepWindow { from: number; to: number }

export const noMarks: ChartMarks = {
  thresholds: new Map(), begins: [], step: -1, actions: [], events: [], window: null, lost: null,
};

const height = 118;
/** Pixels: a marker this near is told of. */
const near = 6;
const labelFont = '10.5px system-ui, sans-serif';

function toNumbers(values: Real[]): (number | null)[] {
  return values.map((v) => {
    const x = num(v);
    return Number.isFinite(x) ? x : null;
  });
}

/** The powers of ten on a logarithmic axis, at most four: more would touch each other. */
function decades(_: uPlot, __: number, low: number, high: number): number[] {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.ceil((last - first + 1) / 4);
  const found: number[] = [];
  for (let power = first; power <= last; power += every) found.push(10 ** power);
  return found;
}

function power(of10: number): string {
  return of10 >= 1e5 || of10 < 1e-3 ? of10.toExponential(0).replace('e+', 'e').replace('-', '−') : number(of10);
}

/** How a value of the signal is said. */
function wordsOf(signal: string): (value: number | null) => string {
  return findSignal(signal).bytes ? bytes : number;
}

/** Values of another run at these steps: the last one before each; null before its first and behind its last. */
function at(steps: number[], other: Series | undefined): (number | null)[] {
  if (!other) return steps.map(() => null);
  const its = other.step.map(num);
  const values = toNumbers(other.mean);
  let i = -1;
  return steps.map((step) => {
    while (i + 1 < its.length && its[i + 1] <= step) i++;
    return i < 0 || step > its[its.length - 1] ? null : values[i];
  });
}

/** A straight line from one point to another. */
function stroke(g: CanvasRenderingContext2D, from: [number, number], to: [number, number], color: string, dash: number[]): void {
  g.save();
  g.strokeStyle = color;
  g.lineWidth = Math.max(1, window.devicePixelRatio);
  g.setLineDash(dash);
  g.beginPath();
  g.moveTo(...from);
  g.lineTo(...to);
  g.stroke();
  g.restore();
}

export class Charts {
  readonly element = h('div', { class: 'charts' });
  private plots: { plot: uPlot; signal: string; mark: HTMLElement }[] = [];
  private beside: Series[] = [];
  private marks: ChartMarks = noMarks;
  private zooming: number | null = null;
  /** What the lines mean. */
  readonly legend = h('div', { class: 'chart-legend muted small' });
  private readonly observer = new ResizeObserver(() => {
    for (const { plot } of this.plots) plot.setSize({ width: this.width(), height });
  });

  /** `zoom`: other steps are wanted; null = all. */
  constructor(private readonly zoom: (window: StepWindow | null) => void = () => undefined) {
    this.observer.observe(this.element);
  }

  /** Moves the marker of the heatmap's step without new data. */
  mark(step: number): void {
    this.marks.step = step;
    for (const { plot, mark } of this.plots) this.place(plot, mark);
  }

  // An element of its own: a marker that moves with each frame paints no plot anew.
  private place(u: uPlot, mark: HTMLElement): void {
    const x = this.marks.step < 0 ? -1 : u.valToPos(this.marks.step, 'x');
    mark.hidden = !(x >= 0 && x <= u.bbox.width / window.devicePixelRatio);
    mark.style.transform = `translateX(${x}px)`;
  }

  /** `beside`: the same of another run. */
  show(all: Series[], marks: ChartMarks, beside: Series[] = []): void {
    this.marks = marks;
    this.beside = beside;
    const shown = all.filter((s) => s.step.length > 0);
    this.drawLegend(shown);
    const same = shown.length > 0 && shown.length === this.plots.length && shown.every((s, i) => s.id.signal === this.plots[i].signal);
    if (same) {
      // New numbers go into the same plots, so that nothing jumps.
      shown.forEach((s, i) => this.renew(this.plots[i].plot, s));
      shown.forEach((s, i) => this.label(i, s));
      return;
    }
    this.clear();
    for (const series of shown) this.add(series);
    oneStop(this.element);
    if (shown.length === 0) this.element.append(h('p', { class: 'state' }, 'No samples yet.'));
  }

  private renew(plot: uPlot, series: Series): void {
    plot.batch(() => {
      plot.setData(this.columns(series));
      this.applyWindow(plot);
    });
  }

  /** The steps that are wanted, unless nearly nothing was measured there. */
  private applyWindow(u: uPlot): void {
    const { window: wanted } = this.marks;
    if (!wanted) return;
    const inside = u.data[0].filter((step) => step >= wanted.from && step <= wanted.to).length;
    if (inside >= 2) u.setScale('x', { min: wanted.from, max: wanted.to });
  }

  private drawLegend(shown: Series[]): void {
    const { begins, actions, events, lost, thresholds } = this.marks;
    const key = (kind: string, words: string) =>
      h('span', { class: 'key' }, h('span', { class: `key-line ${kind}`, 'aria-hidden': 'true' }), words);
    const [firstBeside] = this.beside;
    fill(this.legend,
      key('mean', 'mean'), shown.some((s) => s.downsampled) ? key('band', 'smallest to largest') : null,
      firstBeside ? key('beside', 'beside it') : null,
      [...thresholds.values()].some((all) => all.length > 0) ? key('threshold', 'threshold') : null,
      shown.some((s) => Object.values(this.bounds(s.id.signal)).some((limit) => !Number.isNaN(limit))) ? key('warm', 'beyond it') : null,
      begins.length > 0 ? key('begin', 'alert began') : null,
      actions.length > 0 ? key('action', 'action') : null,
      events.length > 0 ? key('event', 'event') : null,
      lost ? key('lost', 'expected to be lost') : null);
  }

  clear(): void {
    for (const { plot } of this.plots) plot.destroy();
    this.plots = [];
    this.element.replaceChildren();
  }

  private width(): number {
    const box = this.element.querySelector('.chart-box') ?? this.element;  // Charts may stand side by side.
    return Math.max(220, box.clientWidth - 2);
  }

  private columns(series: Series): uPlot.AlignedData {
    const steps = series.step.map(num);
    const columns = [steps, toNumbers(series.min), toNumbers(series.max), toNumbers(series.mean),
      at(steps, this.beside.find((s) => s.id.signal === series.id.signal))];
    // Room for when it is expected to be lost.
    const end = this.marks.lost?.middle ?? -1;
    const last = steps[steps.length - 1] ?? 0;
    if (!this.marks.window && end > last && end < 1.5 * last) columns.forEach((column, i) => column.push(i === 0 ? end : null));
    return columns as uPlot.AlignedData;
  }

  private label(i: number, series: Series): void {
    const value = this.element.children[i]?.querySelector('.chart-now');
    const newest = num(series.mean[series.mean.length - 1]);
    if (value) {
      value.textContent = wordsOf(series.id.signal)(newest);
      value.classList.toggle('late', this.isBeyond(series.id.signal, newest));
    }
  }

  /** The caption above a plot, with its buttons; `canvas` is asked for when a picture is wanted. */
  private caption(series: Series, canvas: () => HTMLCanvasElement): HTMLElement {
    const { signal, layer, head, name: row } = series.id;
    const { help, label } = findSignal(signal);
    const name = row ? [signal, row] : [signal, `layer${layer}`, `head${head}`];
    const rows = () => series.step.map((step, i) => [step, series.min[i], series.mean[i], series.max[i]]);
    const button = (word: string, save: () => void) =>
      h('button', { class: 'link', 'aria-label': `${label} as ${word}`, onclick: save }, word);
    const note = this.marks.notes?.get(signal);
    const newest = num(series.mean[series.mean.length - 1]);
    return h('figcaption', {},
      h('span', { class: 'chart-title' }, label), help ? info(label, help, termOf(signal), `chart ${row}`) : null,
      note ? h('span', { class: 'muted small' }, note) : null,
      h('span', { class: this.isBeyond(signal, newest) ? 'chart-now late' : 'chart-now' }, wordsOf(signal)(newest)),
      button('CSV', () => offerCsv(name, [['step', 'min', 'mean', 'max'], ...rows()])),
      button('PNG', () => offerPng(name, canvas())));
  }

  private options(signal: string, log: boolean, box: HTMLElement, mark: HTMLElement): uPlot.Options {
    const muted = themeColor('--muted');
    const axis = (size: number): uPlot.Axis => ({
      stroke: muted, grid: { stroke: themeColor('--grid'), width: 1 }, ticks: { show: false }, size, font: '11px system-ui',
    });
    const edge: uPlot.Series = { stroke: 'transparent', points: { show: false } };
    const tick = log ? power : wordsOf(signal);
    return {
      width: this.width(), height, legend: { show: false },
      padding: [null, 24, null, null],  // Room for half of the last label.
      cursor: {
        sync: { key: 'head' }, points: { size: 6 }, y: false, drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => (this.zoom(null), null) },
      },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, log: 10 } },
      axes: [
        { ...axis(22), values: (_, splits) => splits.map((v) => v.toLocaleString('en-US')) },
        {
          ...axis(52), ...(log ? { splits: decades, filter: (_: uPlot, splits: number[]) => splits } : {}),
          values: (_, splits) => splits.map((v: number | null) => (v === null ? '' : tick(v))),
        },
      ],
      series: [
        {}, edge, { ...edge },
        { stroke: themeColor('--line'), width: 1.75, points: { show: false }, spanGaps: false },
        { stroke: muted, width: 1.5, dash: [5, 3], points: { show: false }, spanGaps: true },
      ],
      bands: [{ series: [2, 1], fill: themeColor('--band') }],
      hooks: {
        drawAxes: [(u) => this.drawMarks(u, signal)],
        draw: [(u) => this.place(u, mark)],
        setCursor: [(u) => this.tell(u, box, signal)],
        setSelect: [(u) => this.selected(u)],
      },
    };
  }

  private add(series: Series): void {
    const { signal } = series.id;
    const positive = series.min.every((v) => !(num(v) <= 0));
    const box = h('div', { class: 'chart-box' });
    const mark = h('div', { class: 'step-mark', hidden: true });
    this.element.append(h('figure', { class: 'chart' }, this.caption(series, () => plot.ctx.canvas), box));
    const plot = new uPlot(this.options(signal, findSignal(signal).scale === 'log' && positive, box, mark), this.columns(series), box);
    plot.over.append(mark);
    this.plots.push({ plot, signal, mark });
    this.applyWindow(plot);
  }

  /** A stretch was drawn with the mouse, in one plot and so in all. */
  private selected(u: uPlot): void {
    const { left, width } = u.select;
    if (width < near) return;
    const [from, to] = [Math.max(0, Math.floor(u.posToVal(left, 'x'))), Math.ceil(u.posToVal(left + width, 'x'))];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zooming ??= window.setTimeout(() => {
      this.zooming = null;
      if (to - from >= 2) this.zoom({ from, to });
    });
  }

  /** The value under the cursor beside the title, else the newest; where the mouse is, with unit, threshold and marker. */
  private tell(u: uPlot, box: HTMLElement, signal: string): void {
    const now = box.parentElement?.querySelector('.chart-now');
    if (!now) return;
    const mean = u.data[3];
    const under = u.cursor.idx ?? null;
    let index = under ?? mean.length - 1;
    while (under === null && index > 0 && mean[index] === null) index--;  // Steps behind the newest have no value yet.
    const step = under === null ? '' : ` at ${Number(u.data[0][index]).toLocaleString('en-US')}`;
    now.textContent = `${wordsOf(signal)(mean[index] ?? null)}${step}`;
    now.classList.toggle('late', this.isBeyond(signal, mean[index] ?? NaN));
    this.tip(u, box, signal, under);
  }

  private tip(u: uPlot, box: HTMLElement, signal: string, index: number | null): void {
    let tip = box.querySelector<HTMLElement>('.tip');
    const isHere = index !== null && u.over.matches(':hover');
    if (!isHere) {
      tip?.remove();
      return;
    }
    if (!tip) {
      tip = h('div', { class: 'tip' });
      box.append(tip);
    }
    const [words, { label, unit }] = [wordsOf(signal), findSignal(signal)];
    const value = (column: number) => u.data[column][index] ?? null;
    const isBand = value(1) !== value(2);
    const beside = value(4);
    const at = u.cursor.left ?? 0;
    const marker = this.markers().find((m) => Math.abs(u.valToPos(m.step, 'x') - at) <= near);
    const limits = this.marks.thresholds.get(signal) ?? [];
    tip.textContent = [
      `${label} ${words(value(3))}${unit ? ` ${unit}` : ''}`, isBand ? `${words(value(1))} to ${words(value(2))}` : '',
      beside === null ? '' : `beside ${words(beside)}`, limits.length > 0 ? `threshold ${limits.map(words).join(', ')}` : '',
      `step ${Number(u.data[0][index]).toLocaleString('en-US')}`, marker?.label ?? '',
    ].filter((part) => part !== '').join(' · ');
    const left = u.bbox.left / window.devicePixelRatio + at + 12;
    tip.style.left = `${Math.max(0, Math.min(left, box.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = '2px';
  }

  /** Where the map's colours would be warm: beyond the threshold of an alert, or a declared limit. */
  private bounds(signal: string): Bounds {
    const declared = this.marks.declared?.get(signal);
    if (declared) return declared;
    const limits = (this.marks.thresholds.get(signal) ?? []).filter((limit) => limit !== 0);
    const { scale } = findSignal(signal);
    if (limits.length === 0) return { low: NaN, high: NaN };
    const least = Math.min(...limits.map(Math.abs));
    if (scale === 'signed') return { low: -least, high: least };
    return isWarmBelow(findSignal(signal)) ? { low: Math.max(...limits), high: NaN } : { low: NaN, high: Math.min(...limits) };
  }

  private isBeyond(signal: string, value: number): boolean {
    const { low, high } = this.bounds(signal);
    return value < low || value > high;
  }

  private markers(): (Moment & { color: string })[] {
    const { begins, actions, events, lost } = this.marks;
    return [
      ...begins.map((m) => ({ ...m, color: '--critical' })), ...actions.map((m) => ({ ...m, color: '--ok' })),
      ...(lost ? [{ step: lost.middle, label: 'expected to be lost', color: '--critical' }] : []),
      ...events.map((m) => ({ ...m, color: '--info' })),
    ];
  }

  private drawMarks(u: uPlot, signal: string): void {
    const { left, top, width, height: high } = u.bbox;
    const { begins, actions, events, lost, thresholds } = this.marks;
    const vertical = (step: number, color: string, dash: number[]) => {
      const x = u.valToPos(step, 'x', true);
      if (x >= left && x <= left + width) stroke(u.ctx, [x, top], [x, top + high], themeColor(color), dash);
    };
    if (begins.length > 0) {
      const from = Math.max(left, u.valToPos(Math.min(...begins.map(({ step }) => step)), 'x', true));
      u.ctx.save();
      u.ctx.fillStyle = themeColor('--alert-band');
      u.ctx.fillRect(from, top, Math.max(0, left + width - from), high);
      u.ctx.restore();
    }
    const bounds = this.bounds(signal);
    const y = (value: number) => Math.min(top + high, Math.max(top, u.valToPos(value, 'y', true)));
    const warm = (from: number, to: number) => {
      u.ctx.save();
      u.ctx.fillStyle = themeColor('--warm');
      u.ctx.fillRect(left, from, width, Math.max(0, to - from));
      u.ctx.restore();
    };
    if (!Number.isNaN(bounds.high)) warm(top, y(bounds.high));
    if (!Number.isNaN(bounds.low)) warm(y(bounds.low), top + high);
    for (const { step } of events) vertical(step, '--info', [1, 3]);
    for (const { step } of begins) vertical(step, '--critical', []);
    for (const { step } of actions) vertical(step, '--ok', []);
    if (lost) vertical(lost.middle, '--critical', [2, 3]);
    for (const threshold of thresholds.get(signal) ?? []) {
      const at = u.valToPos(threshold, 'y', true);
      if (at >= top && at <= top + high) stroke(u.ctx, [left, at], [left + width, at], themeColor('--warning'), [6, 4]);
    }
    if (u === this.plots[0]?.plot) this.drawLabels(u);
  }

  /** Words at the markers, in the first chart; one that would touch another is left to the mouse. */
  private drawLabels(u: uPlot): void {
    const { left, top, width } = u.bbox;
    const dpr = window.devicePixelRatio;
    const taken: [from: number, to: number][] = [];
    u.ctx.save();
    u.ctx.font = labelFont.replace('10.5', String(10.5 * dpr));
    u.ctx.textBaseline = 'top';
    u.ctx.textAlign = 'left';
    for (const { step, label, color } of this.markers()) {
      const x = u.valToPos(step, 'x', true);
      const long = u.ctx.measureText(label).width + 6 * dpr;
      const from = x + long <= left + width ? x : x - long;
      if (x < left || x > left + width || from < left || taken.some(([a, b]) => from < b && from + long > a)) continue;
      taken.push([from, from + long]);
      u.ctx.fillStyle = themeColor('--panel');
      u.ctx.globalAlpha = 0.8;
      u.ctx.fillRect(from + dpr, top, long - 2 * dpr, 13 * dpr);
      u.ctx.globalAlpha = 1;
      u.ctx.fillStyle = themeColor(color);
      u.ctx.fillText(label, from + 3 * dpr, top + dpr);
    }
    u.ctx.restore();
  }
}
