// Samples of one signal of named rows. Rows may take turns: what one sample lacks is looked for in
// those before it. What was asked for once is not asked for again.
import { api, num, nums } from './api';
import type { GetMatrixResponse } from './wire';

interface Sample { step: number; values: number[] }

const heldMax = 128;

export class Samples {
  private subject = '';
  private readonly kept = new Map<number, Sample>();
  private readonly before = new Map<number, number>();  // Of a sample's step, the step of the one before it; -1 = none.

  constructor(private readonly run: string) {}

  /** Drops what is held if it is of another signal or of another attempt of the job. */
  of(signal: string, attempt: number): void {
    const subject = `${signal} ${attempt}`;
    if (subject !== this.subject) this.clear();
    this.subject = subject;
  }

  private clear(): void {
    this.kept.clear();
    this.before.clear();
  }

  private hold(matrix: GetMatrixResponse): Sample {
    const sample = { step: num(matrix.step), values: nums(matrix.values) };
    if (this.kept.size >= heldMax) this.clear();
    this.kept.set(sample.step, sample);
    return sample;
  }

  /** The sample before that of `step`; null = none, or it would have to be asked for and `ask` is false. */
  private async earlier(step: number, signal: string, ask: boolean): Promise<Sample | null> {
    const known = this.before.get(step);
    const held = known === undefined ? undefined : this.kept.get(known);
    if (held || known === -1 || !ask || step <= 0) return held ?? null;
    const matrix = await api.matrix(this.run, signal, step - 1);
    const sample = matrix.values.length > 0 ? this.hold(matrix) : null;
    this.before.set(step, sample?.step ?? -1);
    return sample;
  }

  /**
   * The values of `matrix`; those that it lacks from the newest of the `turns - 1` samples before it that have them.
   * `ask` says before each whether the server may be asked.
   */
  async together(matrix: GetMatrixResponse, turns: number, ask: () => boolean): Promise<number[]> {
    let sample: Sample | null = this.hold(matrix);
    const values = [...sample.values];
    let lacking = values.flatMap((value, i) => (Number.isNaN(value) ? [i] : []));
    for (let turn = 1; turn < turns && lacking.length > 0; turn++) {
      sample = await this.earlier(sample.step, matrix.signal, ask());
      if (!sample) break;
      for (const i of lacking) values[i] = sample.values[i] ?? NaN;
      lacking = lacking.filter((i) => Number.isNaN(values[i]));
    }
    return values;
  }
}
