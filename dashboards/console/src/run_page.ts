// One run: the verdict, every head or tensor at a step, one of them over all steps, alerts.
import { actionTitle, isApplied } from './action_words';
import { ActionsView } from './actions_view';
import { counts, isMuted, leading, toldThreshold, worstSeverity } from './alerts';
import { AlertsView } from './alerts_view';
import { ApiError, api, num, nums } from './api';
import { importedBadge, runBadge, runWords } from './badges';
import { ChartMarks, Charts, StepWindow } from './charts';
import { fill, focusIn, h } from './dom';
import { ago, counted, integer } from './format';
import { meanStepSeconds } from './left';
import { Cell, CellKind, Heatmap, HeatmapData, cellName, middle, worstCells, worstTable } from './heatmap';
import { ModelMap, modelMap } from './model_map';
import { Panels } from './panels';
import { Route, formatRoute } from './route';
import { RunChanges } from './run_changes';
import { Moment, RunEvents } from './run_events';
import { Samples } from './samples';
import {
  causalNames, expertSignals, expertSignalsOf, findRowSignal, findSignal, headSignals, ownMatrices, ownOfRun, rowSignalsOf, runSignals,
  termOf,
} from './signals';
import { term } from './terms';
import { VerdictView, evidenceKey, shownEvidence } from './verdict';
import type { Action, Alert, Evidence, GetMatrixResponse, OwnSignal, Run, Series, SeriesId } from './wire';

const seriesPoints = 600;
/** Steps: an illness that has just begun is shown with at least half of that before it. */
const windowMin = 400;
/** Back to where a newest value is looked for. */
const newestSteps = 500;

/** The line beside the title. */
function factWords(run: Run): string {
  const { layout, attention, reporters } = run.description;
  const reported = ago(num(run.last_report_unix_ns));
  const size = `${counted(layout.layers, 'layer')} × ${counted(layout.heads, 'head')}`;
  const words = [`step ${integer(num(run.step))}`, size, attention?.kernel, attention?.score_dtype];
  if (run.ended) words.push(`${run.end_reason || 'ended'} ${reported}`);
  else words.push(`${run.ranks_reporting}/${counted(reporters, 'rank')}`, `last report ${reported}`);
  return words.filter(Boolean).join(' · ');
}

/** What the charts are of: a head, a cell of an own signal, or a tensor or module by its name. */
interface Subject extends Cell { kind: CellKind; name: string }

function subjectName({ kind, layer, head, name }: Subject): string {
  if (name) return name;
  return kind === 'layer' || kind === 'rank' ? `${kind} ${layer}` : `layer ${layer} ${kind} ${head}`;
}

/** A signal whose cells are not heads: of the job's own, or of experts. */
interface Cells { name: string; kind: CellKind; layers: number; heads: number; help: string }

function kindOfOwn(own: OwnSignal): CellKind {
  const kind = own.granularity.replace('GRANULARITY_', '').toLowerCase();
  return kind === 'expert' || kind === 'layer' || kind === 'rank' ? kind : 'head';
}

export class RunPage {
  readonly element: HTMLElement;
  private readonly title = h('h1');
  private readonly facts = h('p', { class: 'muted' });
  private readonly changes = new RunChanges();
  private readonly verdict: VerdictView;
  private newest = new Map<string, number>();
  private readonly heatmap = new Heatmap((cell) => this.select(cell));
  private readonly heatState = h('p', { class: 'state', hidden: true });
  private readonly worst = h('div');
  private readonly columns: HTMLElement;
  private readonly mapTitle = h('h2');
  private readonly picker = h('select', { id: 'signal', onchange: () => this.pick(this.picker.value) });
  private picks = '';
  private readonly help = h('p', { class: 'muted small help' });
  private readonly slider: HTMLInputElement;
  private readonly stepText = h('output', { class: 'step' });
  private readonly liveButton: HTMLButtonElement;
  private readonly charts = new Charts((window) => this.zoom(window));
  private readonly zoomBar = h('div', { class: 'zoom-bar' });
  private readonly events: RunEvents;
  private readonly headTitle = h('h2');
  private readonly alertsView = new AlertsView((layer, head) => this.go({ layer, head, row: null }), () => this.reload());
  private readonly actionsView = new ActionsView(() => this.reload());
  private readonly besidePicker = h('select', { id: 'beside', onchange: () => this.go({ beside: this.besidePicker.value || null }) });
  private readonly panels: Panels;
  private run: Run | null = null;
  private actions: Action[] = [];
  private alerts: Alert[] = [];
  private matrix: HeatmapData | null = null;
  private median = { of: '', value: 0 };
  private readonly samples: Samples;
  private map: ModelMap = modelMap([]);
  private mapOf = '';
  private readonly seen = new Set<number>();
  private secondsPerStep = 0;
  private wantedStep: number | null = null;
  private held = false;  // The slider, by the pointer.
  private busy = false;
  private again = false;
  private chartsFor = '';

  /** `reload` refreshes this page and deals with errors. */
  constructor(private route: Route, private readonly name: string, private readonly reload: () => void) {
    this.samples = new Samples(name);
    this.events = new RunEvents(name);
    this.verdict = new VerdictView(name, (key) => this.alertsView.judgeFirst(key), () => this.reload());
    this.panels = new Panels(name, (signal, { layer, head }) => this.go({ signal, layer, head, row: null }),
      (window) => this.zoom(window));
    this.slider = h('input', {
      type: 'range', min: 0, max: 0, value: 0, 'aria-label': 'Step of the heatmap',
      oninput: () => this.scrub(Number(this.slider.value)), onchange: () => this.go({ step: Number(this.slider.value) }),
      onpointerdown: () => this.hold(),
    });
    this.liveButton = h('button', { onclick: () => this.go({ step: null }) }, 'Newest');
    this.columns = h('div', { class: 'columns', hidden: true },
      h('div', { class: 'stack' }, this.headsPanel(), this.alertsView.element, this.actionsView.element), this.headPanel());
    fill(this.title, name);
    const title = h('div', { class: 'title-row' }, this.title, this.facts, this.changes.element);
    this.element = h('main', { class: 'page' }, title, this.verdict.element, this.columns, this.panels.element);
  }

  private headsPanel(): HTMLElement {
    const label = h('label', { for: 'signal', class: 'visually-hidden' }, 'Signal');
    return h('section', { class: 'panel', 'aria-label': 'Map' },
      h('div', { class: 'panel-head' }, this.mapTitle, label, this.picker),
      this.help, this.heatState, this.heatmap.element,
      h('div', { class: 'scrubber' }, this.slider, this.stepText, this.liveButton), this.worst);
  }

  private headPanel(): HTMLElement {
    const beside = h('span', {}, h('label', { for: 'beside', class: 'muted small' }, 'Beside '), this.besidePicker);
    return h('section', { class: 'panel', 'aria-label': 'What is chosen' },
      h('div', { class: 'panel-head' }, this.headTitle, beside), this.zoomBar, this.charts.legend, this.charts.element);
  }

  /** The address changed, the run did not. */
  navigate(route: Route): void {
    this.route = route;
    this.reload();
  }

  /** d: to what can be done first. */
  onKey(key: string): boolean {
    return key === 'd' && this.verdict.toDeed();
  }

  private go(change: Partial<Route>): void {
    location.hash = formatRoute({ ...this.route, ...change });
  }

  /** Which steps the charts show: null = all. */
  private zoom(window: StepWindow | null): void {
    this.go(window ?? { from: 0, to: null });
  }

  /** What the address says, else the illness and half as much before it; null = the whole run. */
  private window(): StepWindow | null {
    const { run, route: { from, to } } = this;
    if (!run) return null;
    const now = num(run.step);
    if (from !== null) return from === 0 && to === null ? null : { from, to: Math.max(from + 2, to ?? now) };
    const alert = leading(this.alerts);
    if (!alert) return null;
    const first = num(alert.last.first_step);
    const begin = Math.floor(Math.max(0, first - Math.max(windowMin, now - first) / 2));
    const lost = this.lost()?.middle ?? now;
    return { from: begin, to: lost > now && lost - now < now - begin ? Math.ceil(lost) : Math.max(now, begin + 2) };
  }

  /** What is shown, and the ways to other steps without a mouse. */
  private drawZoom(): void {
    const [window, now] = [this.window(), this.run ? num(this.run.step) : 0];
    const { from, to } = window ?? { from: 0, to: now };
    const middle = (from + Math.min(to, now)) / 2;
    const button = (words: string, label: string, change: Partial<Route>) =>
      h('button', { 'aria-label': label, 'data-focus': label, onclick: () => this.go(change) }, words);
    const isIllness = this.route.from === null && window !== null;
    const focus = focusIn(this.zoomBar);
    fill(this.zoomBar,
      h('span', { class: 'muted small' }, window ? `steps ${integer(from)} to ${integer(to)}` : 'the whole run'),
      window ? button('Whole run', 'Show the whole run', { from: 0, to: null }) : null,
      !isIllness && leading(this.alerts) ? button('The illness', 'Show the steps of the illness', { from: null, to: null }) : null,
      to - from > 8 ? button('+', 'Zoom in', { from: Math.floor(middle), to: Math.ceil(Math.max(middle + 2, Math.min(to, now))) }) : null,
      window ? button('−', 'Zoom out', { from: Math.max(0, Math.floor(from - (to - from))), to }) : null,
      h('span', { class: 'muted small' }, 'Drag over a chart to zoom.'));
    focus();
  }

  /** A signal was chosen; a row stays chosen while it is of the same kind. */
  private pick(signal: string): void {
    this.go({ signal, row: findRowSignal(signal)?.of === findRowSignal(this.signal)?.of ? this.route.row : null });
  }

  /** A cell of the map was chosen. */
  private select(cell: Cell): void {
    if (this.matrix?.map) this.go({ row: cellName(this.matrix, cell), layer: null, head: null });
    else this.go({ layer: cell.layer, head: this.matrix?.kind === 'head' ? this.toQuery(cell.head) : cell.head, row: null });
  }

  private get signal(): string {
    if (this.route.signal !== null) return this.route.signal;
    const layout = this.run?.description.layout;
    const told = this.toldSignal();
    if (told !== null) return told;
    const rows = this.run && layout?.heads === 0 ? rowSignalsOf(this.run) : [];
    return rows.length > 0 ? rows[0].name : 'drift_ratio';
  }

  /** The signal of the alert in the verdict, if a map can show it. */
  private toldSignal(): string | null {
    const { run } = this;
    const alert = leading(this.alerts);
    if (!run || !alert) return null;
    const { heads } = run.description.layout;
    const known = new Set([...(heads > 0 ? headSignals : []), ...rowSignalsOf(run), ...expertSignalsOf(run)].map((s) => s.name));
    return shownEvidence(alert).find(({ signal }) => known.has(signal))?.signal ?? null;
  }

  /** The signal that the map shows, if its cells are no heads and have no names. */
  private cells(): Cells | undefined {
    const { run, signal } = this;
    const own = run && ownMatrices(run).find(({ name }) => name === signal);
    if (own) return { ...own, kind: kindOfOwn(own) };
    const found = expertSignals.find(({ name }) => name === signal);
    if (!run || !found) return undefined;
    const { layers, experts } = run.description.layout;
    return { name: signal, kind: found.of, layers, heads: found.of === 'expert' ? experts : 1, help: found.help };
  }

  /** What is chosen, else what the verdict names, else the worst of the map. */
  private subject(): Subject {
    const run = this.run;
    const cells = this.cells();
    const { layer, head, row } = this.route;
    const rows = findRowSignal(this.signal);
    if (row !== null && rows) return { kind: rows.of, layer: 0, head: 0, name: row };
    const kind = cells?.kind ?? 'head';
    const size = cells ?? run?.description.layout;
    if (layer !== null && head !== null && size && layer < size.layers && head < size.heads) return { kind, layer, head, name: '' };
    const alert = leading(this.alerts);
    if (alert && alert.last.head >= 0 && kind === 'head') return { kind, layer: alert.last.layer, head: alert.last.head, name: '' };
    const matrix = this.matrix;
    if (!matrix) return { kind, layer: 0, head: 0, name: '' };
    const worst: Cell = worstCells(matrix, 1)[0] ?? { layer: 0, head: 0 };
    if (!matrix.map) return { kind, layer: worst.layer, head: worst.head, name: '' };
    return { kind: matrix.kind, layer: 0, head: 0, name: cellName(matrix, worst) };
  }

  /** One load at a time; a refresh during one starts one more after it. */
  async refresh(): Promise<void> {
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    try {
      do {
        this.again = false;
        await this.load();
      } while (this.again);
    } finally {
      this.busy = false;
    }
  }

  private async load(): Promise<void> {
    const [run, alerts] = await Promise.all([api.run(this.name), api.alerts(this.name)]);
    this.run = run;
    this.alerts = alerts.alerts;
    this.columns.hidden = false;
    this.drawPicker(run);
    this.drawHead();
    const mayAsk = () => !this.again && this.wantedStep === null;
    const isNew = this.matrix?.signal.name !== this.signal;
    const first = await this.loadMatrix(this.step(), isNew ? () => false : mayAsk);
    if (first && isNew) await this.show(first, mayAsk);
    await this.loadActions();
    await this.events.read();
    await this.loadSeries();
    await this.loadNewest(run);
    this.drawHead();
    await this.loadPanels(run);
    this.drawHead();
  }

  /** The signals that the map can show; a list that is open stays as it is while they are the same. */
  private drawPicker(run: Run): void {
    const rows = rowSignalsOf(run);
    const groups: [string, { name: string; label: string }[]][] = [
      ['Heads', headSignals], ['Tensors', rows.filter((s) => s.of === 'tensor')], ['Modules', rows.filter((s) => s.of === 'module')],
      ['Experts', expertSignalsOf(run)],
      ["The job's own", ownMatrices(run).map(({ name }) => ({ name, label: name }))],
    ];
    const shown = groups.filter(([, signals]) => signals.length > 0);
    const picks = shown.flatMap(([, signals]) => signals.map((s) => s.name)).join();
    if (picks === this.picks) return;
    this.picks = picks;
    fill(this.picker, ...shown.map(([label, signals]) =>
      h('optgroup', { label }, ...signals.map((s) => h('option', { value: s.name }, s.label)))));
  }

  private async loadActions(): Promise<void> {
    try {
      const [{ actions, audit }, policy] = await Promise.all([api.actions(this.name), api.policy(this.name)]);
      this.actions = actions;
      this.actionsView.draw(this.name, this.run?.ended ?? false, this.actions, audit, policy);
      this.drawHead();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.actionsView.element.hidden = true;  // The server only watches, or the caller may not see actions.
    }
  }

  /** The newest values of what the verdict shows: those of the alert are of its own step. */
  private async loadNewest(run: Run): Promise<void> {
    const alert = leading(this.alerts);
    const { heads, kv_heads } = run.description.layout;
    const ids = new Map<string, SeriesId>();
    for (const piece of alert ? shownEvidence(alert) : []) {
      const { signal, layer, head } = piece;
      const isHead = layer >= 0 && head >= 0 && headSignals.some((s) => s.name === signal);
      if (!isHead && !runSignals.some((s) => s.name === signal)) continue;
      const keyHead = Math.floor((head * kv_heads) / heads);
      const id = isHead ? { layer, head: findSignal(signal).kvHeads ? keyHead : head } : { layer: 0, head: 0 };
      ids.set(evidenceKey(piece), { signal, ...id, name: '' });
    }
    this.newest = new Map();
    if (ids.size === 0) return;
    const step = num(run.step);
    try {
      const { series } = await api.series(this.name, [...ids.values()], newestSteps, Math.max(0, step - newestSteps), step + 1);
      [...ids.keys()].forEach((key, i) => {
        const values = series[i]?.mean ?? [];
        if (values.length > 0) this.newest.set(key, num(values[values.length - 1]));
      });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;  // Its values at the alert are shown alone.
    }
  }

  private async loadPanels(run: Run): Promise<void> {
    const { alerts } = this;
    const [step, chosen] = [this.route.step ?? -1, this.subject()];
    await this.panels.load({
      run, alerts, step, actions: this.applied(), events: this.events, window: this.window(),
      expert: chosen.kind === 'expert' ? chosen : null, markedExperts: this.markedExperts(),
      series: (wanted) => Promise.all([this.seriesHere(wanted, ''), this.seriesBeside(wanted)]),
    });
  }

  /** The other runs, for the picker; a run that the address names stays in it. */
  private async loadNames(): Promise<void> {
    const { runs } = await api.runs();
    const others = runs.map((run) => [run.description.name, runWords(run)]).filter(([name]) => name !== this.name);
    const chosen = this.route.beside;
    if (chosen !== null && !others.some(([name]) => name === chosen)) others.push([chosen, chosen]);
    fill(this.besidePicker, h('option', { value: '' }, 'no other run'),
      ...others.map(([name, words]) => h('option', { value: name, selected: name === chosen }, words)));
  }

  /** The same series of the run beside; none where it has no such head. */
  private async seriesBeside(wanted: SeriesId[]): Promise<Series[]> {
    if (this.route.beside === null) return [];
    try {
      return (await api.series(this.route.beside, wanted, seriesPoints, ...this.asked())).series;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      // The other run's job may name no such signals of its own, and no such tensors.
      const known = wanted.filter((id) => id.name === '' && !this.run?.own_signals.some((own) => own.name === id.signal));
      return known.length < wanted.length ? this.seriesBeside(known) : [];
    }
  }

  /** When the run is expected to be lost, by its leading alert. */
  private lost(): { low: number; middle: number; high: number } | null {
    const alert = leading(this.alerts);
    const eta = alert?.last.eta;
    if (!alert || !eta?.known || this.run?.ended) return null;
    const from = num(alert.last.step);
    return { low: from + num(eta.lower_steps), middle: from + num(eta.steps), high: from + num(eta.upper_steps) };
  }

  /** The sample at a step, shown; null: there is none. `ask`: as show() has it. */
  private async loadMatrix(step: number, ask = () => false): Promise<GetMatrixResponse | null> {
    const run = this.run;
    if (!run) return null;
    const name = this.signal;
    const { help, label } = findSignal(name);
    this.picker.value = name;
    this.mapTitle.textContent = `Every ${this.kind()}`;
    const anchor = termOf(this.signal);
    fill(this.help, this.cells()?.help || help, anchor ? term(anchor, 'map') : null);
    try {
      const matrix = await api.matrix(this.name, name, step);
      if (matrix.values.length > 0) {
        this.samples.of(name, run.description.attempt);
        await this.show(matrix, ask);
        return matrix;
      }
      fill(this.heatState, run.signals.length === 0 ? 'No sample has arrived yet.' : `This run does not report ${label}.`);
      this.heatmap.element.hidden = true;
      this.matrix = null;
      fill(this.worst);
    } catch (error) {
      fill(this.heatState, `No ${label} to show: ${(error as Error).message}`);
    }
    this.heatState.hidden = false;
    return null;
  }

  /** What the cells of the map are. */
  private kind(): CellKind {
    return findRowSignal(this.signal)?.of ?? this.cells()?.kind ?? 'head';
  }

  /** `ask`: whether samples before it may be asked for the rows whose turn it was not. */
  private async show(matrix: GetMatrixResponse, ask: () => boolean): Promise<void> {
    const turns = findRowSignal(matrix.signal)?.turns ?? 1;
    const values = turns > 1 ? await this.samples.together(matrix, turns, ask) : nums(matrix.values);
    if (matrix.signal !== this.signal) return;  // Another one was chosen meanwhile.
    this.heatState.hidden = true;
    this.heatmap.element.hidden = false;
    this.matrix = this.laidOut(matrix, values);
    this.heatmap.show(this.matrix, this.chosenCell(), this.anchor(this.matrix));
    fill(this.worst, worstTable(this.matrix, (c) => this.select(c)));
    this.drawStep(this.matrix.step);
  }

  /** The matrix as the map shows it: rows that have names stand where these say. */
  private laidOut({ layers, heads, names, step }: GetMatrixResponse, values: number[]): HeatmapData {
    const [signal, kind] = [findSignal(this.signal), this.kind()];
    if (kind !== 'tensor' && kind !== 'module') {
      const marked = kind === 'head' ? this.toMatrix(this.firing().flatMap((a) => a.last.heads), heads) :
        kind === 'expert' ? this.markedExperts() : [];
      return { signal, kind, map: null, layers, heads, values, step: num(step), marked };
    }
    // Rows of modules are of many kinds: those stand on the map that have had a value. A name keeps its row for good.
    const of = kind === 'module' ? signal.name : kind;
    if (!this.mapOf.startsWith(`${of} `)) this.seen.clear();
    if (kind === 'module') values.forEach((value, row) => Number.isNaN(value) || this.seen.add(row));
    const mapOf = `${of} ${names.length} ${this.seen.size}`;
    if (mapOf !== this.mapOf) this.map = modelMap(names, (row) => kind !== 'module' || this.seen.has(row));
    this.mapOf = mapOf;
    const { map } = this;
    const cells = new Array<number>(map.rowAt.length);
    for (let at = 0; at < cells.length; at++) cells[at] = map.rowAt[at] < 0 ? NaN : values[map.rowAt[at]];
    // Evidence names its rows in its text: one, or a list of them.
    const named = new Set(this.evidence().flatMap((e) => e.text.split(', ')));
    const at = [...named].flatMap((name) => map.cellOf.get(name) ?? []);
    const marked = at.sort((a, b) => a - b).map((cell) => this.cellAt(cell, map.columns));
    return { signal, kind, map, layers: map.lines, heads: map.columns, values: cells, step: num(step), marked };
  }

  private firing(): Alert[] {
    return this.alerts.filter(counts);
  }
  private evidence(): Evidence[] {
    return this.firing().flatMap((a) => a.last.evidence);
  }
  private markedExperts(): Cell[] {
    return this.evidence().filter((e) => e.head >= 0 && e.signal.startsWith('expert_'));
  }
  private applied(): Moment[] {
    return this.actions.flatMap((a) => a.history.filter(isApplied).map((c) => ({ step: num(c.step), label: actionTitle(a) })));
  }
  private cellAt(at: number, columns: number): Cell {
    return { layer: Math.floor(at / columns), head: at % columns };
  }

  /** The cell of what the charts are of; null: it is not on the map. */
  private chosenCell(): Cell | null {
    const { matrix } = this;
    const chosen = this.subject();
    if (!matrix) return null;
    if (!matrix.map) return chosen.name ? null : matrix.kind === 'head' ? this.toMatrix([chosen], matrix.heads)[0] : chosen;
    const at = matrix.map.cellOf.get(chosen.name);
    return at === undefined ? null : this.cellAt(at, matrix.heads);
  }

  /**
   * Where the map's colours turn from cold to warm: what an alert holds the signal against, else what the rules do. That
   * of a multiple of the median is of the sample that was shown first: all steps have one scale. No rule judges the drift
   * of keys that are centred.
   */
  private anchor(matrix: HeatmapData): number {
    const { signal } = matrix;
    const told = toldThreshold(this.alerts, signal.name);
    if (told !== undefined) return told;
    if (signal.anchor !== undefined) return signal.anchor;
    if (signal.ofMedian === undefined || (signal.name === 'drift_ratio' && this.run?.description.attention?.centred)) return 0;
    if (this.median.of !== signal.name) this.median = { of: signal.name, value: middle(matrix.values) };
    return this.median.value > 0 ? signal.ofMedian * this.median.value : 0;
  }

  // Key heads are shared by a group of query heads.
  private toMatrix(cells: Cell[], heads: number): Cell[] {
    const all = this.run?.description.layout.heads ?? heads;
    return cells.map((c) => ({ layer: c.layer, head: Math.floor((c.head * heads) / all) }));
  }
  private toQuery(head: number): number {
    const all = this.run?.description.layout.heads ?? 0;
    return this.matrix ? Math.floor((head * all) / this.matrix.heads) : head;
  }

  /** The series that are drawn: those of what is chosen, cause first, and the run's. */
  private seriesOf(run: Run, { kind, layer, head, name }: Subject): SeriesId[] {
    const { heads, kv_heads, layers } = run.description.layout;
    const keyHead = Math.floor((head * kv_heads) / heads);
    const cells = this.cells();
    const measured = cells && !Number.isNaN(this.matrix?.values[layer * cells.heads + head] ?? NaN);
    const ofExperts = expertSignals.some((s) => s.name === this.signal) ? expertSignalsOf(run) : [];
    const isHead = name === '' && kind === 'head' && layer < layers && head < heads;
    return [
      ...(name ? rowSignalsOf(run).filter((s) => s.of === kind).map((s) => ({ signal: s.name, layer: 0, head: 0, name })) : []),
      ...(measured && ofExperts.length === 0 ? [{ signal: cells.name, layer, head, name: '' }] : []),
      ...ofExperts.filter((s) => s.of === 'layer' || kind === 'expert')
        .map((s) => ({ signal: s.name, layer, head: s.of === 'layer' ? 0 : head, name: '' })),
      ...(isHead ? causalNames : []).map((signal) =>
        ({ signal, layer, head: findSignal(signal).kvHeads ? keyHead : head, name: '' })),
      ...runSignals.map((s) => ({ signal: s.name, layer: 0, head: 0, name: '' })),
      ...ownOfRun(run).map((signal) => ({ signal, layer: 0, head: 0, name: '' })),
    ];
  }

  /** The steps that are asked for: so many points are of what is shown. */
  private asked(): [begin: number, end: number] {
    const window = this.window();
    return window ? [window.from, window.to + 1] : [0, 0];
  }

  /** Nothing of a tensor that the run does not have. */
  private async seriesHere(wanted: SeriesId[], name: string): Promise<Series[]> {
    try {
      return (await api.series(this.name, wanted, seriesPoints, ...this.asked())).series;
    } catch (error) {
      if (name === '' || !(error instanceof ApiError) || error.status !== 404) throw error;
      return [];
    }
  }

  private async loadSeries(): Promise<void> {
    const run = this.run;
    if (!run) return;
    const chosen = this.subject();
    const wanted = this.seriesOf(run, chosen);
    const [series, beside] = await Promise.all([this.seriesHere(wanted, chosen.name), this.seriesBeside(wanted)]);
    const other = this.route.beside;
    if (this.besidePicker.options.length === 0 || this.besidePicker.value !== (other ?? '')) await this.loadNames();
    let note = other ? ` nothing of ${other} to show` : ' cause first, loss last';
    if (beside.length > 0) note = ` dashed: ${other}`;
    const title = subjectName(chosen);
    fill(this.headTitle, chosen.name ? title : title[0].toUpperCase() + title.slice(1), h('span', { class: 'muted small' }, note));
    const subject = `${title}/${other ?? ''}`;
    if (subject !== this.chartsFor) this.charts.clear();
    this.chartsFor = subject;
    this.charts.show(series, this.marks(chosen), beside);
    this.drawZoom();
    const time = series.find((s) => s.id.signal === 'step_seconds');
    if (time && time.mean.length > 0) this.secondsPerStep = num(time.mean[time.mean.length - 1]);
  }

  /** What the charts of a head show beside its series. */
  private marks({ kind, layer, head, name }: Subject): ChartMarks {
    const isHere = (at: Cell) => name === '' && kind === 'head' && at.layer === layer && at.head === head;
    const alerts = this.alerts.filter((a) => counts(a) && a.last.heads.some(isHere)).map((a) => a.last);
    const evidence = name ? this.alerts.flatMap((a) => a.last.evidence) : alerts.flatMap((a) => a.evidence.filter(isHere));
    return {
      thresholds: new Map(evidence.map((e) => [e.signal, [num(e.threshold)].filter(Number.isFinite)])),
      begins: alerts.map((a) => ({ step: num(a.first_step), label: `alert: ${a.rule}` })),
      step: this.route.step === null ? -1 : this.matrix?.step ?? -1,
      actions: this.applied(),
      events: this.events.moments,
      window: this.window(),
      lost: this.lost(),
    };
  }

  private drawHead(): void {
    const run = this.run;
    if (!run) return;
    const d = run.description;
    document.title = `${run.stage > 0 ? `(${run.stage}) ` : ''}${d.name} · Bellwether`;
    const imported = run.imported ? term('imported-run', 'title') : null;
    fill(this.title, d.name, ' ', runBadge(run, worstSeverity(this.alerts), isMuted(this.alerts)), ' ', importedBadge(run), imported);
    if (this.secondsPerStep === 0) this.secondsPerStep = meanStepSeconds(run);
    this.facts.textContent = factWords(run);
    this.changes.show(run);
    const { alerts, actions, secondsPerStep, newest } = this;
    const checkpoint = (step: number) => this.events.checkpointBefore(step);
    this.verdict.draw({ run, alerts, actions, secondsPerStep, newest, checkpoint });
    this.alertsView.draw(this.name, this.alerts, this.route.alert);
    this.slider.max = String(Math.max(0, num(run.step)));
    this.slider.step = String(Math.max(1, Math.round(num(run.step) / 500)));
    if (!this.scrubs()) this.slider.value = this.route.step === null ? this.slider.max : String(this.route.step);
  }

  private drawStep(step: number): void {
    const isNewest = this.route.step === null && !this.scrubs();
    this.stepText.textContent = `step ${integer(step)}${isNewest ? ' (newest)' : ''}`;
    this.liveButton.disabled = isNewest;
    this.slider.setAttribute('aria-valuetext', `step ${step}`);
  }

  /** News come while the slider is held: what it shows stays until it is let go. */
  private hold(): void {
    this.held = true;
    const release = () => {
      this.held = false;
      for (const event of ['pointerup', 'pointercancel']) window.removeEventListener(event, release);
      this.reload();  // Where the slider is back at its old step there is no change.
    };
    for (const event of ['pointerup', 'pointercancel']) window.addEventListener(event, release);
  }

  private scrubs(): boolean {
    return this.held || this.wantedStep !== null;
  }

  /** Whose map is shown; -1 = the newest. */
  private step(): number {
    return this.scrubs() && this.matrix ? this.wantedStep ?? Number(this.slider.value) : this.route.step ?? -1;
  }

  /** While the slider moves, only its newest step is loaded. */
  private scrub(step: number): void {
    const idle = this.wantedStep === null;
    this.wantedStep = step;
    if (!idle) return;
    void (async () => {
      while (this.wantedStep !== null) {
        const next: number = this.wantedStep;
        await this.loadMatrix(next);
        this.charts.mark(this.matrix?.step ?? -1);
        this.panels.mark(this.matrix?.step ?? -1);
        if (this.wantedStep === next) this.wantedStep = null;
      }
    })();
  }

  fail(message: string): void {
    if (this.run === null) {
      fill(this.title, this.name);
      this.verdict.say(`Cannot load this run: ${message} `, h('a', { href: '#/' }, 'All runs'));
    }
  }

  redraw(): void {
    this.heatmap.redraw();
    this.panels.redraw();
    this.charts.clear();
    this.chartsFor = '';
    this.reload();
  }
}
