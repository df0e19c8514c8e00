// A small course of one signal in a list of runs. Only what can be seen is asked for, a few at once, and rarely.
import { ApiError, api, num, nums } from './api';
import { h, themeColor } from './dom';
import { number } from './format';
import { findSignal } from './signals';
import type { Run, SeriesId } from './wire';

const [width, height, points] = [110, 26, 48];
const atOnce = 4;
/** Asked for again behind so many milliseconds, if the run went on. */
const againMs = 30000;

class Sparkline {
  readonly element = h('canvas', { class: 'spark', role: 'img', 'aria-label': 'not loaded' });
  private readonly label = h('div', { class: 'muted small' });
  readonly cell = h('td', { class: 'course' }, this.element, this.label);
  private values: number[] = [];
  private of = '';
  private step = -1;
  private askedAt = -Infinity;

  /** `id`: what is drawn. */
  constructor(public run: Run, public id: SeriesId) {}

  isDue(): boolean {
    const { signal, layer, head } = this.id;
    if (this.of !== `${signal} ${layer} ${head}`) return true;
    return num(this.run.step) > this.step && performance.now() - this.askedAt > againMs;
  }

  async load(): Promise<void> {
    const { signal, layer, head } = this.id;
    this.askedAt = performance.now();
    this.of = `${signal} ${layer} ${head}`;
    this.step = num(this.run.step);
    try {
      const { series } = await api.series(this.run.description.name, [this.id], points);
      this.values = nums(series[0]?.mean ?? []).filter(Number.isFinite);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.values = [];
    }
    this.draw();
  }

  draw(): void {
    const { label, scale } = findSignal(this.id.signal);
    const { values } = this;
    const dpr = window.devicePixelRatio || 1;
    [this.element.width, this.element.height] = [width * dpr, height * dpr];
    this.label.textContent = values.length > 1 ? label : '';
    const g = this.element.getContext('2d');
    if (!g || values.length < 2) return;
    const [low, high] = [Math.min(...values), Math.max(...values)];
    this.element.setAttribute('aria-label', `${label} from ${number(values[0])} to ${number(values[values.length - 1])}`);
    const isLog = scale === 'log' && low > 0;
    const place = (v: number) => (high === low ? 0.5 : isLog ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
    g.scale(dpr, dpr);
    g.strokeStyle = themeColor(this.run.ended ? '--muted' : '--line');
    g.lineWidth = 1.5;
    g.beginPath();
    values.forEach((v, i) => g.lineTo(1 + (i / (values.length - 1)) * (width - 2), height - 2 - place(v) * (height - 4)));
    g.stroke();
  }
}

export class Sparklines {
  private readonly lines = new Map<string, Sparkline>();
  private readonly seen = new Set<Sparkline>();
  private readonly byElement = new WeakMap<Element, Sparkline>();
  private running = 0;
  private readonly observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const line = this.byElement.get(target);
      if (line && isIntersecting) this.seen.add(line);
      else if (line) this.seen.delete(line);
    }
    void this.pump();
  });

  /** The cell of a run: the same one each time. */
  cell(run: Run, id: SeriesId): HTMLElement {
    const { uuid } = run.description;
    let line = this.lines.get(uuid);
    if (!line) {
      line = new Sparkline(run, id);
      this.lines.set(uuid, line);
      this.byElement.set(line.cell, line);
      this.observer.observe(line.cell);
    }
    [line.run, line.id] = [run, id];
    return line.cell;
  }

  /** Loads what can be seen and is old. */
  async pump(): Promise<void> {
    while (this.running < atOnce) {
      const next = [...this.seen].find((line) => line.isDue());
      if (!next) return;
      this.running++;
      void next.load().catch(() => undefined).finally(() => {  // A server that is away is told of by the list.
        this.running--;
        void this.pump();
      });
    }
  }

  redraw(): void {
    for (const line of this.lines.values()) line.draw();
  }
}
