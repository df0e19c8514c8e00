// The frame: header, theme, connection, and which page is shown.
import 'uplot/dist/uPlot.min.css';
import './style.css';
import { AlertsPage } from './alerts_page';
import { ApiError, answeredAt, api } from './api';
import { callerWords, learn } from './caller';
import { fill, h } from './dom';
import { GlossaryPage } from './glossary_page';
import { isTyped, keyHelp } from './keys';
import { Live, LiveState } from './live';
import { Route, formatRoute, parseRoute } from './route';
import { RunPage } from './run_page';
import { RunbookPage } from './runbook_page';
import { RunsPage } from './runs_page';
import { StatusPage } from './status_page';
import { watchTerms } from './terms';

type Page = AlertsPage | GlossaryPage | RunPage | RunbookPage | RunsPage | StatusPage;
type Theme = 'auto' | 'dark' | 'light';

const refreshMsMin = 1000;

class App {
  private readonly status = h('span', { class: 'conn', role: 'status' });
  private readonly announce = h('div', { 'aria-live': 'assertive', class: 'visually-hidden' });
  private readonly banner = h('div', { class: 'banner', hidden: true, role: 'alert' });
  private readonly outlet = h('div');
  private readonly version = h('span', { class: 'muted small' });
  private readonly who = h('span', { class: 'muted small', title: 'Whom the server takes you for' });
  private readonly themeButton = h('button', { class: 'quiet', onclick: () => this.nextTheme() });
  private readonly help = keyHelp();
  private shown: Route | null = null;
  private theme: Theme = 'auto';
  private page: Page | null = null;
  private shownRun: string | null = null;
  private readonly skipToDeed = h('a', {
    href: '#content', class: 'skip', hidden: true, onclick: (event) => this.toDeed(event),
  }, 'Skip to what to do');
  private live: Live | null = null;
  private timer: number | null = null;

  start(root: Element): void {
    fill(root, this.skipLink(), this.skipToDeed, this.header(), this.banner, this.announce, this.outlet, this.help);
    document.addEventListener('keydown', (event) => this.onKey(event));
    this.setTheme((localStorage.getItem('theme') as Theme | null) ?? 'auto');
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.redraw());
    addEventListener('hashchange', () => this.show(parseRoute(location.hash)));
    this.connection('polling');
    this.show(parseRoute(location.hash));
    this.live = new Live({
      alert: (run, summary, severity, state) => {
        this.announce.textContent = `${state} ${severity}: ${summary}`;
        if (this.shownRun === null || this.shownRun === run) this.soon();
      },
      runs: (names) => {
        if (names === null || this.shownRun === null || names.includes(this.shownRun)) this.soon();
      },
      state: (state) => this.connection(state),
    });
    watchTerms();
    void this.meet();
  }

  private skipLink(): HTMLElement {
    const skip = (event: Event) => {
      event.preventDefault();
      this.outlet.querySelector<HTMLElement>('h1')?.focus();
    };
    return h('a', { href: '#content', class: 'skip', onclick: skip }, 'Skip to content');
  }

  private toDeed(event: Event): void {
    event.preventDefault();
    if (this.page instanceof RunPage) this.page.onKey('d');
  }

  private header(): HTMLElement {
    const pages = h('nav', { 'aria-label': 'Pages' }, h('a', { href: '#/' }, 'Runs'),
      h('a', { href: '#/alerts' }, 'Alerts'), h('a', { href: '#/status' }, 'Status'), h('a', { href: '#/glossary' }, 'Glossary'));
    return h('header', { class: 'top' },
      h('a', { href: '#/', class: 'brand' }, 'Bellwether'), this.version, pages,
      h('span', { class: 'spacer' }), this.who, this.status,
      h('button', { class: 'quiet', 'aria-label': 'Keys', title: 'Keys: ? shows them', onclick: () => this.help.showModal() }, '?'),
      this.themeButton);
  }

  /** Asks for the server's version and the caller's name: both may differ after it was away. */
  private async meet(): Promise<void> {
    try {
      const info = await api.info();
      this.version.textContent = `${info.version} · ${info.backend.split(':')[0]}`;
      if (!learn(info)) return;
      this.who.textContent = callerWords();
      void this.refresh();
    } catch {
      // The page itself says that the server does not answer.
    }
  }

  private show(route: Route): void {
    if (route.run !== null && this.page instanceof RunPage && this.shownRun === route.run) {
      this.shown = route;
      this.page.navigate(route);
      return;
    }
    // The same list with other filters: what has the keyboard keeps it.
    const isSame = this.shown?.page === route.page && route.run === null;
    const isFirst = this.shown === null;
    this.shown = route;
    if (isSame && (this.page instanceof AlertsPage || this.page instanceof RunsPage)) {
      this.page.navigate(route);
      return;
    }
    if (isSame && this.page instanceof GlossaryPage) {
      this.page.navigate(route.of);
      return;
    }
    this.shownRun = route.run;
    this.page = this.pageOf(route);
    const titles = {
      runs: 'Bellwether', run: 'Bellwether', alerts: 'Alerts · Bellwether', status: 'Status · Bellwether',
      runbook: 'Runbook · Bellwether', glossary: 'Glossary · Bellwether',
    };
    if (route.run === null) document.title = titles[route.page];
    for (const link of document.querySelectorAll('nav a')) {
      const here = link.getAttribute('href') === formatRoute({ ...route, run: null, of: '', query: '' });
      if (here && route.run === null) link.setAttribute('aria-current', 'page');
      else link.removeAttribute('aria-current');
    }
    fill(this.outlet, this.page.element);
    const title = this.page.element.querySelector('h1');
    title?.setAttribute('tabindex', '-1');
    // The keyboard goes on from the page that was asked for, and readers of screens hear its name.
    if (!isFirst) title?.focus();
    this.skipToDeed.hidden = route.run === null;
    if (this.page instanceof GlossaryPage) this.page.show();
    void this.refresh();
  }

  private pageOf(route: Route): Page {
    if (route.run !== null) return new RunPage(route, route.run, () => void this.refresh());
    if (route.page === 'runbook') return new RunbookPage(route.of, new URLSearchParams(route.query).get('run'));
    if (route.page === 'glossary') return new GlossaryPage(route.of);
    if (route.page === 'alerts') return new AlertsPage(route, () => void this.refresh());
    return route.page === 'status' ? new StatusPage() : new RunsPage(route, () => void this.refresh());
  }

  private onKey(event: KeyboardEvent): void {
    if (isTyped(event) || this.help.open) return;
    if (event.key === '?') {
      this.help.showModal();
      event.preventDefault();
    } else if (this.page && 'onKey' in this.page && this.page.onKey(event.key)) {
      event.preventDefault();
    }
  }

  /** At most once a second, however fast the news come. */
  private soon(): void {
    this.timer ??= window.setTimeout(() => {
      this.timer = null;
      void this.refresh();
    }, refreshMsMin);
  }

  private async refresh(): Promise<void> {
    const page = this.page;
    if (!page) return;
    try {
      await page.refresh();
      this.live?.reachable(true);
      this.banner.hidden = true;
    } catch (error) {
      const answered = error instanceof ApiError;
      page.fail(answered ? error.message : 'the server does not answer');
      this.live?.reachable(answered);
      if (answered) return;
      this.banner.hidden = false;
      const since = answeredAt > 0 ? `Last answer at ${new Date(answeredAt).toLocaleTimeString()}: what you see is old.` : '';
      fill(this.banner, `The server does not answer. ${since} Trying again.`);
      this.soon();
    }
  }

  private connection(state: LiveState): void {
    const words = { live: 'Live', polling: 'Polling', disconnected: 'Disconnected' };
    this.status.className = `conn ${state}`;
    this.status.textContent = words[state];
    if (state === 'live') void this.meet();
  }

  private nextTheme(): void {
    const order: Theme[] = ['auto', 'dark', 'light'];
    this.setTheme(order[(order.indexOf(this.theme) + 1) % order.length]);
    localStorage.setItem('theme', this.theme);
    this.redraw();
  }

  private setTheme(theme: Theme): void {
    this.theme = theme;
    document.documentElement.dataset.theme = theme;
    this.themeButton.textContent = { auto: 'Theme: auto', dark: 'Theme: dark', light: 'Theme: light' }[theme];
  }

  private redraw(): void {
    if (this.page instanceof RunPage || this.page instanceof RunsPage) this.page.redraw();
  }
}

const root = document.getElementById('app');
if (root) new App().start(root);
