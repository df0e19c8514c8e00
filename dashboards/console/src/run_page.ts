// One run: the verdict, every head at a step, one head over all steps, alerts.
import { ActionsView } from './actions_view';
import { isFiring, leading, worstSeverity } from './alerts';
import { AlertsView } from './alerts_view';
import { ApiError, api, num } from './api';
import { importedBadge, runBadge, runWords } from './badges';
import { ChartMarks, Charts } from './charts';
import { fill, h } from './dom';
import { ago, integer } from './format';
import { Cell, Heatmap, HeatmapData, worstTable } from './heatmap';
import { Route, formatRoute } from './route';
import { causalNames, findSignal, headSignals, ownOfRun, runSignals } from './signals';
import { verdict } from './verdict';
import type { Action, Alert, GetMatrixResponse, Run, Series, SeriesId } from './wire';

const seriesPoints = 600;

/** The line beside the title. */
function factWords(run: Run): string {
  const { layout, attention, reporters } = run.description;
  const reported = ago(num(run.last_report_unix_ns));
  const size = `${layout.layers} layers × ${layout.heads} heads`;
  const words = [`step ${integer(num(run.step))}`, size, attention?.kernel, attention?.score_dtype];
  if (run.ended) words.push(`${run.end_reason || 'ended'} ${reported}`);
  else words.push(`${run.ranks_reporting}/${reporters} ranks`, `last report ${reported}`);
  return words.filter(Boolean).join(' · ');
}

export class RunPage {
  readonly element: HTMLElement;
  private readonly title = h('h1');
  private readonly facts = h('p', { class: 'muted' });
  private readonly verdictBox = h('div', { 'aria-live': 'polite' }, h('p', { class: 'state' }, 'Loading the run…'));
  private readonly heatmap = new Heatmap((cell) => this.select(cell.layer, cell.head));
  private readonly heatState = h('p', { class: 'state', hidden: true });
  private readonly worst = h('div');
  private readonly columns: HTMLElement;
  private readonly picker: HTMLSelectElement;
  private readonly help = h('p', { class: 'muted small help' });
  private readonly slider: HTMLInputElement;
  private readonly stepText = h('output', { class: 'step' });
  private readonly liveButton: HTMLButtonElement;
  private readonly charts = new Charts();
  private readonly headTitle = h('h2');
  private readonly alertsView = new AlertsView((layer, head) => this.select(layer, head), () => this.reload());
  private readonly actionsView = new ActionsView(() => this.reload());
  private readonly besidePicker = h('select', { id: 'beside', onchange: () => this.go({ beside: this.besidePicker.value || null }) });
  private run: Run | null = null;
  private actions: Action[] = [];
  private alerts: Alert[] = [];
  private matrix: HeatmapData | null = null;
  private secondsPerStep = 0;
  private wantedStep: number | null = null;
  private busy = false;
  private again = false;
  private chartsFor = '';

  /** `reload` refreshes this page and deals with errors. */
  constructor(private route: Route, private readonly name: string, private readonly reload: () => void) {
    this.picker = h('select', { id: 'signal', onchange: () => this.go({ signal: this.picker.value }) },
      ...headSignals.map((s) => h('option', { value: s.name }, s.label)));
    this.slider = h('input', {
      type: 'range', min: 0, max: 0, value: 0, 'aria-label': 'Step of the heatmap',
      oninput: () => this.scrub(Number(this.slider.value)), onchange: () => this.go({ step: Number(this.slider.value) }),
    });
    this.liveButton = h('button', { onclick: () => this.go({ step: null }) }, 'Newest');
    this.columns = h('div', { class: 'columns', hidden: true },
      h('div', { class: 'stack' }, this.headsPanel(), this.alertsView.element, this.actionsView.element), this.headPanel());
    const title = h('div', { class: 'title-row' }, this.title, this.facts);
    this.element = h('main', { class: 'page' }, title, this.verdictBox, this.columns);
  }

  private headsPanel(): HTMLElement {
    const label = h('label', { for: 'signal', class: 'visually-hidden' }, 'Signal');
    return h('section', { class: 'panel', 'aria-label': 'All heads' },
      h('div', { class: 'panel-head' }, h('h2', {}, 'Every head'), label, this.picker),
      this.help, this.heatState, this.heatmap.element,
      h('div', { class: 'scrubber' }, this.slider, this.stepText, this.liveButton), this.worst);
  }

  private headPanel(): HTMLElement {
    const beside = h('span', {}, h('label', { for: 'beside', class: 'muted small' }, 'Beside '), this.besidePicker);
    return h('section', { class: 'panel', 'aria-label': 'One head' },
      h('div', { class: 'panel-head' }, this.headTitle, beside), this.charts.element);
  }

  /** The address changed, the run did not. */
  navigate(route: Route): void {
    this.route = route;
    this.reload();
  }

  private go(change: Partial<Route>): void {
    location.hash = formatRoute({ ...this.route, ...change });
  }

  private select(layer: number, head: number): void {
    this.go({ layer, head });
  }

  private get signal(): string {
    return this.route.signal ?? 'drift_ratio';
  }

  /** The chosen head, else that of the verdict, else the worst of the heatmap. */
  private head(): Cell {
    const layout = this.run?.description.layout;
    const { layer, head } = this.route;
    if (layer !== null && head !== null && layout && layer < layout.layers && head < layout.heads) return { layer, head };
    const alert = leading(this.alerts);
    if (alert && alert.last.head >= 0) return { layer: alert.last.layer, head: alert.last.head };
    let best = 0;
    this.matrix?.values.forEach((v, i, all) => {
      if (v > all[best] || Number.isNaN(all[best])) best = i;
    });
    return this.matrix ? { layer: Math.floor(best / this.matrix.heads), head: best % this.matrix.heads } : { layer: 0, head: 0 };
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
    this.drawHead();
    await this.loadMatrix(this.route.step ?? -1);
    await this.loadActions();
    await this.loadSeries();
    this.drawHead();
  }

  private async loadActions(): Promise<void> {
    try {
      const [{ actions, audit }, policy] = await Promise.all([api.actions(this.name), api.policy(this.name)]);
      this.actions = actions;
      this.actionsView.draw(this.name, this.run?.ended ?? false, this.actions, audit, policy);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.actionsView.element.hidden = true;  // The server only watches, or the caller may not see actions.
    }
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
      return (await api.series(this.route.beside, wanted, seriesPoints)).series;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      // The other run's job may name no such signals of its own.
      const known = wanted.filter((id) => !this.run?.own_signals.some((own) => own.name === id.signal));
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

  private async loadMatrix(step: number): Promise<void> {
    const run = this.run;
    if (!run) return;
    this.picker.value = this.signal;
    const signal = findSignal(this.signal);
    this.help.textContent = signal.help;
    let matrix: GetMatrixResponse;
    try {
      matrix = await api.matrix(this.name, this.signal, step);
    } catch (error) {
      this.heatState.hidden = false;
      fill(this.heatState, `No ${signal.label} to show: ${(error as Error).message}`);
      return;
    }
    const values = matrix.values.map(num);
    this.heatState.hidden = values.length > 0;
    this.heatmap.element.hidden = values.length === 0;
    if (values.length === 0) {
      fill(this.heatState, run.signals.length === 0 ? 'No sample has arrived yet.' : `This run does not report ${signal.label}.`);
      fill(this.worst);
      return;
    }
    const marked = this.alerts.filter(isFiring).flatMap((a) => a.last.heads);
    const { layers, heads } = matrix;
    this.matrix = { signal, layers, heads, values, step: num(matrix.step), marked: this.toMatrix(marked, heads) };
    const chosen = this.head();
    this.heatmap.show(this.matrix, this.toMatrix([chosen], heads)[0]);
    fill(this.worst, worstTable(this.matrix, (c) => this.select(c.layer, this.toQuery(c.head))));
    this.drawStep(this.matrix.step);
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

  /** The series that are drawn for a head: its own, cause first, and the run's. */
  private seriesOf(run: Run, { layer, head }: Cell): SeriesId[] {
    const { heads, kv_heads } = run.description.layout;
    const keyHead = Math.floor((head * kv_heads) / heads);
    return [
      ...causalNames.map((signal) => ({ signal, layer, head: findSignal(signal).kvHeads ? keyHead : head, name: '' })),
      ...runSignals.map((s) => ({ signal: s.name, layer: 0, head: 0, name: '' })),
      ...ownOfRun(run).map((signal) => ({ signal, layer: 0, head: 0, name: '' })),
    ];
  }

  private async loadSeries(): Promise<void> {
    const run = this.run;
    if (!run) return;
    const chosen = this.head();
    const wanted = this.seriesOf(run, chosen);
    const [{ series }, beside] = await Promise.all([api.series(this.name, wanted, seriesPoints), this.seriesBeside(wanted)]);
    const other = this.route.beside;
    if (this.besidePicker.options.length === 0 || this.besidePicker.value !== (other ?? '')) await this.loadNames();
    let note = other ? ` nothing of ${other} to show` : ' cause first, loss last';
    if (beside.length > 0) note = ` dashed: ${other}`;
    fill(this.headTitle, `Layer ${chosen.layer} head ${chosen.head}`, h('span', { class: 'muted small' }, note));
    const subject = `${chosen.layer}/${chosen.head}/${other ?? ''}`;
    if (subject !== this.chartsFor) this.charts.clear();
    this.chartsFor = subject;
    this.charts.show(series, this.marks(chosen), beside);
    const time = series.find((s) => s.id.signal === 'step_seconds');
    if (time && time.mean.length > 0) this.secondsPerStep = num(time.mean[time.mean.length - 1]);
  }

  /** What the charts of a head show beside its series. */
  private marks({ layer, head }: Cell): ChartMarks {
    const isHere = (at: Cell) => at.layer === layer && at.head === head;
    const alerts = this.alerts.filter((a) => isFiring(a) && a.last.heads.some(isHere)).map((a) => a.last);
    const evidence = alerts.flatMap((a) => a.evidence.filter(isHere));
    const changes = this.actions.flatMap((a) => a.history);
    return {
      thresholds: new Map(evidence.map((e) => [e.signal, num(e.threshold)])),
      begins: alerts.map((a) => num(a.first_step)),
      step: this.route.step === null ? -1 : this.matrix?.step ?? -1,
      actions: changes.filter((c) => c.state === 'ACTION_STATE_APPLIED').map((c) => num(c.step)),
      lost: this.lost(),
    };
  }

  private drawHead(): void {
    const run = this.run;
    if (!run) return;
    const d = run.description;
    document.title = `${run.stage > 0 ? `(${run.stage}) ` : ''}${d.name} · Bellwether`;
    fill(this.title, d.name, ' ', runBadge(run, worstSeverity(this.alerts)), ' ', importedBadge(run));
    const elapsed = num(run.last_report_unix_ns) - num(run.started_unix_ns);
    if (this.secondsPerStep === 0 && num(run.step) > 0 && elapsed > 0) this.secondsPerStep = elapsed / 1e9 / num(run.step);
    this.facts.textContent = factWords(run);
    fill(this.verdictBox, verdict(run, this.alerts, this.secondsPerStep));
    this.alertsView.draw(this.name, this.alerts, this.route.alert);
    this.slider.max = String(Math.max(0, num(run.step)));
    this.slider.step = String(Math.max(1, Math.round(num(run.step) / 500)));
    // Not while it is being dragged.
    if (this.wantedStep === null) this.slider.value = this.route.step === null ? this.slider.max : String(this.route.step);
  }

  private drawStep(step: number): void {
    this.stepText.textContent = `step ${integer(step)}${this.route.step === null ? ' (newest)' : ''}`;
    this.liveButton.disabled = this.route.step === null;
    this.slider.setAttribute('aria-valuetext', `step ${step}`);
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
        if (this.wantedStep === next) this.wantedStep = null;
      }
    })();
  }

  fail(message: string): void {
    if (this.run === null) {
      fill(this.title, this.name);
      fill(this.verdictBox, h('p', { class: 'state error' }, `Cannot load this run: ${message} `, h('a', { href: '#/' }, 'All runs')));
    }
  }

  redraw(): void {
    this.heatmap.redraw();
    this.charts.clear();
    this.chartsFor = '';
    this.reload();
  }
}
