// A matrix on a canvas: layer x head, one cell per head, or the model's map, one
// cell per tensor.
//
// A grid for screen readers: the arrows move from cell to cell, Home and End
// along a line, Enter chooses; the cell's value is spoken. Heads of an alert
// carry a ring and a mark besides their colour; a cell without a value is
// hatched.
import { fill, h, tableHead, themeColor } from './dom';
import { counted, integer, number } from './format';
import { Scale, fixedScale, makeScale } from './color';
import type { ModelMap } from './model_map';
import { Signal, isWarmBelow } from './signals';
import { offerCsv, offerPng } from './download';

/** What a cell belongs to. */
export type CellKind = 'head' | 'layer' | 'expert' | 'rank' | 'tensor' | 'module';

export interface HeatmapData {
  signal: Signal;
  kind: CellKind;
  /** Of tensors and modules: what stands where. */
  map: ModelMap | null;
  layers: number;
  heads: number;
  /** [layers][heads]; NaN = not measured, or not a number. */
  values: number[];
  step: number;
  /** Heads of firing alerts, strongest first. */
  marked: { layer: number; head: number }[];
}
export interface Cell { layer: number; head: number }

const shownWorst = 6;
const axis = 34;
const axisTop = 18;
const titleLength = 24;

/** False: a cell of a map in which there is no tensor. */
function stands(data: HeatmapData, i: number): boolean {
  return data.map === null || data.map.rowAt[i] >= 0;
}

/** "layer 3, head 4", "model.norm.weight"; empty where nothing stands. */
export function cellName({ kind, map, heads }: HeatmapData, { layer, head }: Cell): string {
  if (map) return map.names[map.rowAt[layer * heads + head]] ?? '';
  return kind === 'layer' || kind === 'rank' ? `${kind} ${layer}` : `layer ${layer}, ${kind} ${head}`;
}

/** Makes `canvas` width x height pixels, each as `pixel` of its index, row by row, says. */
function paintPixels(canvas: HTMLCanvasElement, width: number, height: number, pixel: (i: number) => number): void {
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const g = canvas.getContext('2d');
  if (!g) return;
  const image = g.createImageData(width, height);
  const words = new Uint32Array(image.data.buffer);
  for (let i = 0; i < words.length; i++) words[i] = pixel(i);
  g.putImageData(image, 0, 0);
}

export class Heatmap {
  readonly element: HTMLElement;
  private readonly canvas = h('canvas', { 'aria-hidden': 'true' });
  // A pixel a head; then heads and axes, painted once a matrix: a cursor that moves draws rings over a copy.
  private readonly pixels = h('canvas');
  private readonly painted = h('canvas');
  private readonly legend = h('canvas', { 'aria-hidden': 'true', class: 'legend-bar' });
  private readonly legendMarks = h('div', { class: 'legend-marks', 'aria-hidden': 'true' });
  private readonly legendLimit = h('span', { class: 'legend-limit' });
  private readonly legendLow = h('span');
  private readonly legendMiddle = h('span');
  private readonly legendHigh = h('span');
  private readonly tip = h('div', { class: 'tip', hidden: true });
  private readonly cell: HTMLElement;
  private readonly grid: HTMLElement;
  private data: HeatmapData | null = null;
  private scale: Scale | null = null;
  private limit = 0;  // Where colours turn warm; 0 = nowhere.
  private cursor: Cell = { layer: 0, head: 0 };
  private selected: Cell | null = null;
  private hovered: Cell | null = null;
  private size = { w: 10, h: 10 };
  private top = axisTop;

  /** `id` is of the cell where the keyboard is, `name` what its buttons call the map. */
  constructor(private readonly choose: (cell: Cell) => void, id = 'heat-cell', private readonly name = 'The map') {
    this.cell = h('div', { role: 'gridcell', id, class: 'visually-hidden' });
    this.grid = h('div', {
      role: 'grid', tabindex: 0, class: 'heat-grid', 'aria-activedescendant': id, 'aria-label': 'Layer by head',
      onkeydown: (e) => this.onKey(e as KeyboardEvent), onmousemove: (e) => this.onMove(e as MouseEvent),
      onmouseleave: () => this.hover(null), onclick: (e) => this.onClick(e as MouseEvent),
      onfocus: () => this.drawRings(), onblur: () => this.drawRings(),
    }, this.canvas, h('div', { role: 'row', class: 'visually-hidden' }, this.cell), this.tip);
    this.element = h('div', { class: 'heat' }, this.grid, this.legendBox());
    new ResizeObserver(() => this.draw()).observe(this.grid);
  }

  private legendBox(): HTMLElement {
    const keys = h('div', { class: 'legend-keys' },
      this.legendLimit, h('span', { class: 'key-none' }), 'no value', h('span', { class: 'key-mark' }), 'alert',
      this.saveButton('csv'), this.saveButton('png'));
    const ticks = h('div', { class: 'legend-ticks' }, this.legendLow, this.legendMiddle, this.legendHigh);
    return h('div', { class: 'legend' }, this.legend, this.legendMarks, ticks, keys);
  }

  private saveButton(ending: 'csv' | 'png'): HTMLElement {
    const word = ending.toUpperCase();
    return h('button', { class: 'link', 'aria-label': `${this.name} as ${word}`, onclick: () => this.save(ending) }, word);
  }

  /** `anchor`: where the colours turn from cold to warm; 0 = nowhere. */
  show(data: HeatmapData, selected: Cell | null, anchor = 0): void {
    // One scale for all steps of a map, so that colours are told apart while the slider moves.
    const before = data.map && this.data?.signal === data.signal ? this.scale : null;
    this.data = data;
    // The keyboard stays where it is while values come, but goes along with another head.
    if (selected && !this.isSelected(selected)) this.cursor = { ...selected };
    this.selected = selected;
    this.cursor = this.inside(this.cursor, data);
    // What is far from its threshold in a map of tensors is worth telling apart, too: its scale spans what was seen.
    const [kind, lowIsBad, isLogMap] = [data.signal.scale, isWarmBelow(data.signal), data.map !== null && data.signal.scale === 'log'];
    this.scale = anchor > 0 && !isLogMap ? fixedScale(kind, lowIsBad, anchor) : makeScale(data.values, kind, lowIsBad, anchor, before);
    this.limit = anchor;
    this.grid.setAttribute('aria-rowcount', String(data.layers));
    this.grid.setAttribute('aria-colcount', String(data.heads));
    const size = data.map ? counted(data.map.names.length, data.kind)
      : `${counted(data.layers, 'layer')} by ${counted(data.heads, data.kind)}`;
    this.grid.setAttribute('aria-label', `${data.signal.label}, ${size}, step ${data.step}`);
    this.draw();
    this.speak();
    // What lies under the mouse is of another sample now, or gone.
    const at = this.hovered;
    this.hover(at && at.layer < data.layers && at.head < data.heads && cellName(data, at) ? at : null);
  }

  private save(ending: 'csv' | 'png'): void {
    const data = this.data;
    if (!data) return;
    const name = [data.signal.name, `step${data.step}`];
    if (ending === 'png') return offerPng(name, this.canvas);
    if (data.map) {
      const named = data.values.flatMap((value, i) => (stands(data, i) ? [[data.map?.names[data.map.rowAt[i]] ?? '', value]] : []));
      return offerCsv(name, [[data.kind, data.signal.name], ...named]);
    }
    const rows = data.values.map((value, i) => [Math.floor(i / data.heads), i % data.heads, value]);
    offerCsv(name, [['layer', data.kind, data.signal.name], ...rows]);
  }

  private value(cell: Cell): number {
    return this.data ? this.data.values[cell.layer * this.data.heads + cell.head] : NaN;
  }

  private words(cell: Cell): string {
    if (!this.data) return '';
    const name = cellName(this.data, cell);
    if (name === '') return 'nothing';
    const marked = this.data.marked.some((m) => m.layer === cell.layer && m.head === cell.head);
    const value = this.value(cell);
    return `${name}: ${Number.isNaN(value) ? 'no value' : number(value)}${marked ? ', alert' : ''}`;
  }

  private speak(): void {
    this.cell.setAttribute('aria-rowindex', String(this.cursor.layer + 1));
    this.cell.setAttribute('aria-colindex', String(this.cursor.head + 1));
    this.cell.setAttribute('aria-selected', String(this.isSelected(this.cursor)));
    this.cell.textContent = this.words(this.cursor);
  }

  private inside(cell: Cell, data: HeatmapData): Cell {
    return { layer: Math.min(data.layers - 1, Math.max(0, cell.layer)), head: Math.min(data.heads - 1, Math.max(0, cell.head)) };
  }

  private isSelected(cell: Cell): boolean {
    return this.selected !== null && this.selected.layer === cell.layer && this.selected.head === cell.head;
  }

  private draw(): void {
    const data = this.data;
    const scale = this.scale;
    const width = this.grid.clientWidth;
    if (!data || !scale || width === 0) return;
    const w = Math.max(data.map ? 1 : 3, Math.min(60, (width - axis - 4) / data.heads));
    const cellHeight = Math.max(4, Math.min(30, Math.max(w * 0.75, 4), 520 / data.layers));
    this.size = { w, h: cellHeight };
    const titles = w >= 11 ? data.map?.titles ?? [] : [];
    this.top = titles.length > 0 ? axisTop + 6.2 * Math.min(titleLength, Math.max(...titles.map((title) => title.length))) : axisTop;
    const height = this.top + cellHeight * data.layers + 4;
    const dpr = window.devicePixelRatio || 1;
    // A canvas that gets a size is allocated anew, also if it is the same one.
    const fit = (canvas: HTMLCanvasElement) => {
      if (canvas.width !== Math.round(width * dpr)) canvas.width = Math.round(width * dpr);
      if (canvas.height !== Math.round(height * dpr)) canvas.height = Math.round(height * dpr);
    };
    fit(this.canvas);
    fit(this.painted);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const g = this.painted.getContext('2d');
    if (!g) return;
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    g.clearRect(0, 0, width, height);
    this.drawCells(g, data, scale);
    this.drawAxes(g, data, titles);
    this.drawRings();
    this.drawLegend(scale);
  }

  private drawCells(g: CanvasRenderingContext2D, data: HeatmapData, scale: Scale): void {
    const { w, h: high } = this.size;
    const [right, bottom] = [axis + data.heads * w, this.top + data.layers * high];
    const none: number[] = [];
    paintPixels(this.pixels, data.heads, data.layers, (i) => {
      if (!Number.isNaN(data.values[i])) return scale.color(data.values[i]);
      if (stands(data, i)) none.push(i);
      return 0;
    });
    g.imageSmoothingEnabled = false;
    g.drawImage(this.pixels, axis, this.top, right - axis, bottom - this.top);
    if (w >= 8) {
      for (let head = 1; head <= data.heads; head++) g.clearRect(axis + head * w - 1, this.top, 1, bottom - this.top);
      for (let layer = 1; layer <= data.layers; layer++) g.clearRect(axis, this.top + layer * high - 1, right - axis, 1);
    }
    g.strokeStyle = themeColor('--hatch');
    g.lineWidth = 1;
    g.beginPath();
    for (const i of none) {
      const x = axis + (i % data.heads) * w;
      const y = this.top + Math.floor(i / data.heads) * high;
      g.moveTo(x + 1, y + high - 1);
      g.lineTo(x + w - 1, y + 1);
    }
    g.stroke();
  }

  private drawRings(): void {
    const data = this.data;
    const g = this.canvas.getContext('2d');
    if (!data || !g || this.painted.width === 0) return;
    const dpr = window.devicePixelRatio || 1;
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, this.canvas.width, this.canvas.height);
    g.drawImage(this.painted, 0, 0);
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    if (this.selected) this.ring(g, this.selected, themeColor('--text'), 5, false);
    for (const mark of data.marked) this.ring(g, mark, themeColor('--critical'), 2.5, this.size.w >= 14);
    if (document.activeElement === this.grid) this.ring(g, this.cursor, themeColor('--accent'), 3, false);
  }

  private drawAxes(g: CanvasRenderingContext2D, data: HeatmapData, titles: string[]): void {
    g.fillStyle = themeColor('--muted');
    g.font = '11px system-ui, sans-serif';
    g.textBaseline = 'middle';
    g.textAlign = 'right';
    for (let layer = 0, free = -Infinity; layer < data.layers; layer++) {
      const [y, label] = [this.top + (layer + 0.5) * this.size.h, data.map ? data.map.blocks[layer] : String(layer)];
      if (label === '' || y < free) continue;
      g.fillText(label, axis - 6, y);
      free = y + 13;
    }
    if (data.map) return this.drawTitles(g, titles);
    g.textAlign = 'center';
    const everyColumn = Math.ceil(22 / this.size.w);
    for (let head = 0; head < data.heads; head += everyColumn) g.fillText(String(head), axis + (head + 0.5) * this.size.w, 9);
  }

  /** What stands in the columns, from below upwards. */
  private drawTitles(g: CanvasRenderingContext2D, titles: string[]): void {
    g.textAlign = 'left';
    titles.forEach((title, column) => {
      g.save();
      g.translate(axis + (column + 0.5) * this.size.w, this.top - 5);
      g.rotate(-Math.PI / 2);
      g.fillText(title.length > titleLength ? `…${title.slice(1 - titleLength)}` : title, 0, 0);
      g.restore();
    });
  }

  private ring(g: CanvasRenderingContext2D, cell: Cell, color: string, width: number, mark: boolean): void {
    const x = axis + cell.head * this.size.w;
    const y = this.top + cell.layer * this.size.h;
    g.lineWidth = width + 2;
    g.strokeStyle = themeColor('--panel');
    g.strokeRect(x - 1, y - 1, this.size.w + 1, this.size.h + 1);
    g.lineWidth = width;
    g.strokeStyle = color;
    g.strokeRect(x - 1, y - 1, this.size.w + 1, this.size.h + 1);
    if (!mark) return;
    g.fillStyle = color;
    g.beginPath();
    g.arc(x + this.size.w, y, 7, 0, 7);
    g.fill();
    g.fillStyle = '#fff';
    g.font = 'bold 10px system-ui, sans-serif';
    g.textAlign = 'center';
    g.textBaseline = 'middle';
    g.fillText('!', x + this.size.w, y + 0.5);
  }

  private drawLegend(scale: Scale): void {
    paintPixels(this.legend, 240, 1, (x) => scale.color(scale.at(x / 239)));
    fill(this.legendMarks, ...scale.marks.map((at) => {
      const mark = h('span');
      mark.style.left = `${100 * at}%`;
      return mark;
    }));
    this.legendLimit.textContent = scale.marks.length === 0 ? 'no threshold' :
      `warm: ${this.data && isWarmBelow(this.data.signal) ? 'below' : 'beyond'} ${number(this.limit)}, the threshold`;
    this.legendLow.textContent = number(scale.low);
    this.legendMiddle.textContent = number(scale.at(0.5));
    this.legendHigh.textContent = number(scale.high);
  }

  private cellAt(event: MouseEvent): Cell | null {
    if (!this.data) return null;
    const box = this.canvas.getBoundingClientRect();
    const head = Math.floor((event.clientX - box.left - axis) / this.size.w);
    const layer = Math.floor((event.clientY - box.top - this.top) / this.size.h);
    const inside = head >= 0 && head < this.data.heads && layer >= 0 && layer < this.data.layers;
    return inside && stands(this.data, layer * this.data.heads + head) ? { layer, head } : null;
  }

  private onMove(event: MouseEvent): void {
    const cell = this.cellAt(event);
    this.hover(cell);
    if (!cell) return;
    const box = this.grid.getBoundingClientRect();
    this.tip.style.left = `${Math.max(0, Math.min(event.clientX - box.left + 14, box.width - this.tip.offsetWidth - 4))}px`;
    this.tip.style.top = `${event.clientY - box.top + 16}px`;
  }

  private hover(cell: Cell | null): void {
    this.hovered = cell;
    this.tip.hidden = cell === null;
    if (cell) this.tip.textContent = this.words(cell);
  }

  private onClick(event: MouseEvent): void {
    const cell = this.cellAt(event);
    if (!cell) return;
    this.cursor = cell;
    this.speak();
    this.choose(cell);
  }

  private onKey(event: KeyboardEvent): void {
    if (!this.data) return;
    const { heads } = this.data;
    const to = { ...this.cursor };
    switch (event.key) {
      case 'ArrowLeft': to.head -= 1; break;
      case 'ArrowRight': to.head += 1; break;
      case 'ArrowUp': to.layer -= 1; break;
      case 'ArrowDown': to.layer += 1; break;
      case 'PageUp': to.layer -= 8; break;
      case 'PageDown': to.layer += 8; break;
      case 'Home': to.head = 0; break;
      case 'End': to.head = heads - 1; break;
      case 'Enter': case ' ': if (cellName(this.data, this.cursor)) this.choose(this.cursor); event.preventDefault(); return;
      default: return;
    }
    event.preventDefault();
    this.cursor = this.inside(to, this.data);
    this.speak();
    this.drawRings();
  }

  /** Again, in the colours of the theme as it is now. */
  redraw(): void {
    this.draw();
  }
}

/** The `count` worst cells of the matrix, worst first. */
export function worstCells(data: HeatmapData, count: number): (Cell & { value: number })[] {
  const [isSigned, lowIsBad] = [data.signal.scale === 'signed', data.signal.lowIsBad];
  const badness = (v: number) => (isSigned ? Math.abs(v) : lowIsBad ? -v : v);
  const order: (Cell & { value: number })[] = [];
  let least = -Infinity;  // What a value must be worse than, once there are enough of them.
  for (let i = 0; i < data.values.length; i++) {
    const value = data.values[i];
    const bad = badness(value);
    if (Number.isNaN(bad) || (order.length === count && bad <= least)) continue;
    const place = order.findIndex((c) => bad > badness(c.value));
    order.splice(place < 0 ? order.length : place, 0, { value, layer: Math.floor(i / data.heads), head: i % data.heads });
    order.length = Math.min(order.length, count);
    least = badness(order[order.length - 1].value);
  }
  return order;
}

/** The upper median of what is a number, found by halving what may hold it: a sort of a large map takes longer than painting it. */
export function middle(values: number[]): number {
  const known = new Float64Array(values.length);
  let count = 0;
  for (const value of values) if (!Number.isNaN(value)) known[count++] = value;
  const wanted = count >> 1;
  for (let [low, high] = [0, count - 1]; low < high;) {
    const pivot = known[(low + high) >> 1];
    let [i, j] = [low, high];
    while (i <= j) {
      while (known[i] < pivot) i++;
      while (known[j] > pivot) j--;
      if (i > j) break;
      const held = known[i];
      known[i++] = known[j];
      known[j--] = held;
    }
    if (wanted <= j) high = j;
    else if (wanted >= i) low = i;
    else break;
  }
  return count > 0 ? known[wanted] : NaN;
}

/** The worst cells as a table, with their numbers. */
export function worstTable(data: HeatmapData, choose: (cell: Cell) => void): HTMLElement {
  const median = middle(data.values);
  const row = (c: Cell & { value: number }) => {
    const name = cellName(data, c);
    const value = h('button', { class: 'link', onclick: () => choose(c), 'aria-label': `Show ${name.replace(',', '')}` }, number(c.value));
    const place = data.map ? [h('td', { class: 'wrap' }, name)] : [h('td', {}, String(c.layer)), h('td', {}, String(c.head))];
    return h('tr', {}, ...place, h('td', {}, value));
  };
  const kind = data.kind[0].toUpperCase() + data.kind.slice(1);
  return h('table', { class: 'worst' },
    h('caption', {}, `Worst ${data.kind}s, step ${integer(data.step)} (median ${number(median)})`),
    tableHead([...(data.map ? [kind] : ['Layer', kind]), data.signal.label]),
    h('tbody', {}, ...worstCells(data, shownWorst).map(row)));
}
