// Numbers and times as people read them at night.

/** 3 or 4 significant digits; NaN says so. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined) return '–';
  if (Number.isNaN(value)) return 'NaN';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace('e+', 'e').replace('-', '−');
  if (size >= 1000) return Math.round(value).toLocaleString('en-US');
  return String(Number(value.toPrecision(3))).replace('-', '−');
}

/** 79456894976 -> "74 GiB". */
export function bytes(value: number | null): string {
  if (value === null || !(Math.abs(value) >= 1024)) return number(value);
  const power = Math.min(5, Math.floor(Math.log2(Math.abs(value)) / 10));
  return `${number(value / 1024 ** power)} ${'KMGTP'[power - 1]}iB`;
}

export function integer(value: number): string {
  return Math.round(value).toLocaleString('en-US');
}

/** "1 step", "2,000 steps". */
export function counted(amount: number, one: string, more = `${one}s`): string {
  return `${integer(amount)} ${amount === 1 ? one : more}`;
}

/** 95 s -> "1 min 35 s". */
export function duration(seconds: number): string {
  if (!Number.isFinite(seconds) || seconds < 0) return '–';
  if (seconds < 1) return 'now';
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function ago(unixNs: number): string {
  if (unixNs <= 0) return 'never';
  const seconds = Date.now() / 1000 - unixNs / 1e9;
  return seconds < 3 ? 'just now' : `${duration(seconds)} ago`;
}

/** "21:40"; with the day where it is not today. */
export function clock(ms: number): string {
  const [at, now] = [new Date(ms), new Date()];
  const time = at.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', hourCycle: 'h23' });
  if (at.toDateString() === now.toDateString()) return time;
  return `${at.toLocaleDateString([], { day: 'numeric', month: 'short' })} ${time}`;
}

/** A whole number of the largest unit that fits: 7200 -> "2 h", 0.03 -> "30 ms", 90 -> "90 s". */
export function lasting(seconds: number): string {
  if (seconds === 0) return '0 s';
  const units: [number, string][] = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's'], [0.001, 'ms']];
  const [size, unit] = units.find(([each]) => seconds >= each && Math.abs(seconds / each - Math.round(seconds / each)) < 1e-6) ?? [1, 's'];
  return `${number(seconds / size)} ${unit}`;
}

/** A value in the unit that its name tells: bytes, milliseconds, seconds, a time; else a count. */
export function amountOf(name: string, value: number): string {
  const word = name.replace(/\{.*/, '').replace(/_total$/, '');
  if (/_timestamp_seconds$/.test(word)) return ago(value * 1e9);
  if (/bytes|(^|[._])memory_max$|query_memory/.test(word)) return bytes(value);
  if (/_ms(_|$)/.test(word)) return lasting(value / 1000);
  if (/_seconds(_|$)/.test(word)) return lasting(value);
  return Number.isInteger(value) ? integer(value) : number(value);
}

/** An option as people read it. */
export function optionText(name: string, value: string): string {
  if (value.trim() === '' || !Number.isFinite(Number(value))) return value;
  if (/_days$/.test(name)) return value === '0' ? 'for ever' : `${value} d`;
  if (/_ratio_/.test(name)) return `${number(100 * Number(value))} %`;
  if (name === 'limits.memory_max' && value === '0') return 'of the machine';
  return amountOf(name, Number(value));
}

export const stageNames = ['healthy', 'drift', 'ties and bias', 'norm growth', 'logits', 'loss'];

export function stageName(stage: number): string {
  return stageNames[stage] ?? `stage ${stage}`;
}
