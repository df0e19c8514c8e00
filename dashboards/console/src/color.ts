// Colours of values: viridis where large is alarming, a diverging map for
// signed values. Both are read by colour-blind people too.

type Rgb = [number, number, number];

// Eleven points of matplotlib's viridis, sampled evenly.
const viridis: Rgb[] = [
  [68, 1, 84], [72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142], [33, 145, 140],
  [34, 168, 132], [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37],
];
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
const viridisTable = table(viridis);
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
  return { low, high, at: (t) => low * Math.exp(t * span), color: (v) => pick(viridisTable, v <= 0 ? 0 : Math.log(v / low) / span) };
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
    low, high, color: (v) => pick(divergingTable, place(v)),
    at: (t) => anchor * Math.exp((2 * t - 1) * (t < 0.5 ? below : above)),
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
    return { low: -size, high: size, at: (t) => (2 * t - 1) * size, color: (v) => pick(divergingTable, (v / size + 1) / 2) };
  }
  if (kind === 'log' && low >= 0 && high > 0) return logScale(positive, high);
  if (high - low < 1e-9) high = low + 1;
  const place = (v: number) => (v - low) / (high - low);
  return {
    low, high, at: (t) => low + t * (high - low),
    color: (v) => pick(viridisTable, lowIsBad ? 1 - place(v) : place(v)),
  };
}
