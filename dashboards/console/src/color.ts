// Colours of values: cold up to a threshold and warm beyond it, blues where there
// is no threshold, a diverging map for signed values. Warm means beyond the
// threshold, and nothing else. All are read by colour-blind people too.

type Rgb = [number, number, number];

// Light is small.
const blues: Rgb[] = [[226, 236, 246], [187, 211, 232], [138, 183, 217], [84, 146, 194], [42, 105, 164], [16, 66, 120]];
const diverging: Rgb[] = [
  [33, 102, 172], [67, 147, 195], [146, 197, 222], [209, 229, 240], [247, 247, 247],
  [253, 219, 199], [244, 165, 130], [214, 96, 77], [178, 24, 43],
];

/** A map's colours as pixels (red in the lowest byte), so many that no eye sees a step. */
function table(map: Rgb[], colours = 512): Uint32Array {
  return Uint32Array.from({ length: colours }, (_, n) => {
    const x = (n / (colours - 1)) * (map.length - 1);
    const i = Math.min(map.length - 2, Math.floor(x));
    const [r, g, b] = map[i].map((v, k) => Math.round(v + (map[i + 1][k] - v) * (x - i)));
    return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  });
}
const bluesTable = table(blues);
const divergingTable = table(diverging);

function pick(colours: Uint32Array, t: number): number {
  return colours[Math.round(Math.min(1, Math.max(0, t)) * (colours.length - 1))];
}

export interface Scale {
  low: number;
  high: number;
  /** As a pixel of ImageData. */
  color(value: number): number;
  /** The value at t in [0, 1] of the legend, left to right. */
  at(t: number): number;
  /** Where on the legend thresholds stand. */
  marks: number[];
}

/** The smallest and largest of what is finite, and the smallest above zero; infinities where there is none. */
function extent(values: number[], before: Scale | null): { low: number; high: number; positive: number } {
  let low = before ? before.low : Infinity;
  let high = before ? before.high : -Infinity;
  let positive = low > 0 ? low : high > 0 ? high : Infinity;
  for (const v of values) {
    if (!Number.isFinite(v)) continue;
    if (v < low) low = v;
    if (v > high) high = v;
    if (v > 0 && v < positive) positive = v;
  }
  return { low, high, positive };
}

/** What is smaller than the largest by more than this has the lowest colour. */
const factorMax = 1e8;

/** By factors; what is not above zero has the lowest colour. */
function logScale(least: number, most: number): Scale {
  const low = Math.max(least, most / factorMax);
  const high = Math.max(most, 10 * low);
  const span = Math.log(high / low);
  const color = (v: number) => pick(bluesTable, v <= 0 ? 0 : Math.log(v / low) / span);
  return { low, high, marks: [], at: (t) => low * Math.exp(t * span), color };
}

/** As logScale, but cold up to `anchor` and warm beyond it. */
function anchoredScale(least: number, most: number, anchor: number): Scale {
  const high = Math.max(most, 10 * anchor);
  const low = Math.min(Math.max(least, anchor / factorMax), anchor / 10);
  const [below, above] = [Math.log(anchor / low), Math.log(high / anchor)];
  const place = (v: number) => {
    if (v <= 0) return 0;
    const far = Math.log(v / anchor);
    return 0.5 + far / (2 * (far < 0 ? below : above));
  };
  return {
    low, high, marks: [0.5], color: (v) => pick(divergingTable, place(v)),
    at: (t) => anchor * Math.exp((2 * t - 1) * (t < 0.5 ? below : above)),
  };
}

/** Beyond the anchor by so much, or below it, a value has the warmest or the coldest colour. */
const farFactor = 30;

/** Of all steps alike, whatever the values are: cold on the good side of the anchor, warm beyond it. */
export function fixedScale(kind: 'log' | 'linear' | 'signed', lowIsBad: boolean, anchor: number): Scale {
  if (kind === 'log') return anchoredScale(anchor / farFactor, anchor * farFactor, anchor);
  if (kind === 'signed') {
    const high = 4 * anchor;
    const warmth = (v: number) => (v <= anchor ? v / anchor / 2 : 0.5 + (v - anchor) / (high - anchor) / 2);
    return {
      low: -high, high, marks: [-anchor, anchor].map((v) => (v / high + 1) / 2), at: (t) => (2 * t - 1) * high,
      color: (v) => pick(divergingTable, warmth(Math.abs(v))),
    };
  }
  const high = anchor < 1 ? 1 : 2 * anchor;
  const place = (v: number) => (v <= anchor ? v / anchor / 2 : 0.5 + (v - anchor) / (high - anchor) / 2);
  return {
    low: 0, high, marks: [0.5], at: (t) => (t <= 0.5 ? 2 * t * anchor : anchor + (2 * t - 1) * (high - anchor)),
    color: (v) => pick(divergingTable, lowIsBad ? 1 - place(v) : place(v)),
  };
}

/**
 * A scale that spans the finite values, at least a factor 10 wide if
 * logarithmic: a healthy model's noise must not look like a fire. One that is
 * logarithmic may have an anchor, where its colours turn from cold to warm. It
 * spans what `before` does, too.
 */
export function makeScale(
  values: number[], kind: 'log' | 'linear' | 'signed', lowIsBad: boolean, anchor = 0, before: Scale | null = null,
): Scale {
  let { low, high, positive } = extent(values, before);
  if (kind === 'log' && anchor > 0) return anchoredScale(positive, high, anchor);
  if (low > high) [low, high] = [0, 1];
  if (kind === 'signed') {
    const size = Math.max(Math.abs(low), Math.abs(high), 1e-12);
    return { low: -size, high: size, marks: [], at: (t) => (2 * t - 1) * size, color: (v) => pick(divergingTable, (v / size + 1) / 2) };
  }
  if (kind === 'log' && low >= 0 && high > 0) return logScale(positive, high);
  if (high - low < 1e-9) high = low + 1;
  const place = (v: number) => (v - low) / (high - low);
  return {
    low, high, marks: [], at: (t) => low + t * (high - low),
    color: (v) => pick(bluesTable, lowIsBad ? 1 - place(v) : place(v)),
  };
}
