// What a run's job has told of itself beside its numbers: the events that are drawn, and the newest that names sequences.
import { ApiError, api, num } from './api';
import { number } from './format';
import type { Event, EventKind } from './wire';

export const sequenceWords = 'largest losses of sequences: ';
const pagesMax = 20;
const heldMax = 100;
const everyMs = 10000;

/** Kinds that a reader of curves wants to see, in words. */
const kinds: Partial<Record<EventKind, string>> = {
  EVENT_KIND_LEARNING_RATE: 'learning rate', EVENT_KIND_RESTORE: 'restore', EVENT_KIND_CENTRING_ON: 'keys centred',
  EVENT_KIND_CENTRING_OFF: 'keys no longer centred', EVENT_KIND_ATTENTION_MODE: 'attention mode', EVENT_KIND_DATA: 'data',
  EVENT_KIND_BATCH_SIZE: 'batch size', EVENT_KIND_SEQUENCE_LENGTH: 'sequence length', EVENT_KIND_ANNOTATION: '',
};
const wordsMax = 40;

export interface Moment { step: number; label: string }

/** `text`: what the job calls it; "" where that says no more than the step. */
export interface Checkpoint { step: number; text: string }

function labelOf({ kind, value, text }: Event): string {
  const amount = num(value) !== 0 && kind !== 'EVENT_KIND_ANNOTATION' && kind !== 'EVENT_KIND_RESTORE' ? number(num(value)) : '';
  const words = [kinds[kind], amount, text].filter((word) => word).join(' ');
  return words.length > wordsMax ? `${words.slice(0, wordsMax - 1)}…` : words;
}

export class RunEvents {
  private after = '0';
  private readAt = -Infinity;
  private readonly held = new Map<string, Moment>();
  private readonly checkpoints = new Map<number, string>();
  /** The newest event that names a run's largest losses; of several ranks' the largest. */
  largest: Event | null = null;

  constructor(private readonly run: string) {}

  /** Those that are drawn, the newest ones of them. */
  get moments(): Moment[] {
    return [...this.held.values()];
  }

  /** The newest one of before a step, of all attempts. */
  checkpointBefore(step: number): Checkpoint | null {
    const newest = Math.max(...[...this.checkpoints.keys()].filter((at) => at < step));
    return Number.isFinite(newest) ? { step: newest, text: this.checkpoints.get(newest) ?? '' } : null;
  }

  /** Pages of events that were whole before are not asked for again. */
  async read(): Promise<void> {
    if (performance.now() - this.readAt < everyMs) return;
    this.readAt = performance.now();
    try {
      for (let page = 0; page < pagesMax; page++) {
        const { events, next_after } = await api.events(this.run, this.after);
        for (const event of events) this.take(event);
        if (num(next_after) === 0) return;
        this.after = next_after;
      }
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;  // A server of before, or one that refuses.
    }
  }

  private take(event: Event): void {
    if (event.kind === 'EVENT_KIND_ANNOTATION' && event.text.startsWith(sequenceWords)) return this.takeLargest(event);
    if (event.kind === 'EVENT_KIND_CHECKPOINT_SAVED') {
      this.checkpoints.set(num(event.step), /^step \d+$/.test(event.text) ? '' : event.text);
    }
    if (kinds[event.kind] === undefined) return;
    const label = labelOf(event);
    this.held.set(`${event.attempt} ${event.step} ${label}`, { step: num(event.step), label });
    if (this.held.size > heldMax) this.held.delete(this.held.keys().next().value as string);
  }

  private takeLargest(event: Event): void {
    const before = this.largest;
    const isSmaller = before?.step === event.step && before.attempt === event.attempt && num(event.value) < num(before.value);
    if (!isSmaller) this.largest = event;
  }
}
