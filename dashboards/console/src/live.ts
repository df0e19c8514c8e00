// Follows the server: by server-sent events, or by polling while there are none.

export type LiveState = 'live' | 'polling' | 'disconnected';

export interface LiveHandler {
  /** A transition of some run's alert. */
  alert(run: string, summary: string, severity: string, state: string): void;
  /** These runs changed; null = any of them. */
  runs(names: string[] | null): void;
  state(state: LiveState): void;
}

const pollMs = 5000;
const retryMs = 30000;

export class Live {
  private source: EventSource | null = null;
  private poll: number | null = null;
  private retry: number | null = null;
  private now: LiveState = 'polling';

  constructor(private readonly handler: LiveHandler) {
    this.open();
  }

  private set(state: LiveState): void {
    if (state === this.now) return;
    this.now = state;
    this.handler.state(state);
  }

  private open(): void {
    const source = new EventSource('api/v1/events');
    this.source = source;
    source.onopen = () => {
      this.stopPolling();
      this.set('live');
    };
    source.addEventListener('alert', (event) => {
      const data = JSON.parse((event as MessageEvent<string>).data) as { run: string; summary: string; severity: string; state: string };
      this.handler.alert(data.run, data.summary, data.severity, data.state);
    });
    source.addEventListener('runs', (event) => {
      const data = JSON.parse((event as MessageEvent<string>).data) as { runs?: string[]; all?: boolean };
      this.handler.runs(data.all ? null : data.runs ?? []);
    });
    source.addEventListener('resync', () => this.handler.runs(null));
    source.onerror = () => {
      // Closed: refused (503, too many streams). In other cases the browser tries again by itself.
      this.startPolling();
      if (source.readyState === EventSource.CLOSED) {
        this.source = null;
        this.retry ??= window.setTimeout(() => {
          this.retry = null;
          if (this.source === null) this.open();
        }, retryMs);
      }
    };
  }

  private startPolling(): void {
    if (this.poll !== null) return;
    // A failed call may have reported "disconnected" already; the next call that succeeds takes it back.
    if (this.now !== 'disconnected') this.set('polling');
    this.poll = window.setInterval(() => this.handler.runs(null), pollMs);
    this.handler.runs(null);
  }

  private stopPolling(): void {
    if (this.poll !== null) window.clearInterval(this.poll);
    this.poll = null;
  }

  /** Called after each call: whether the server answered. */
  reachable(yes: boolean): void {
    if (!yes) this.set('disconnected');
    else if (this.now === 'disconnected') this.set(this.source?.readyState === EventSource.OPEN ? 'live' : 'polling');
  }
}
