// The model as a map: blocks down, tensors across, by what the names say.
//
// model.layers.7.mlp.up_proj.weight is of block 7 of the stack model.layers, in the
// column mlp.up_proj.weight. What has no number stands above the blocks if the job
// named it before them, else below.

/** Where the rows of a run stand on the map. */
export interface ModelMap {
  names: string[];
  lines: number;
  columns: number;
  /** [lines][columns]: the row of a cell; -1 = there is none. */
  rowAt: Int32Array;
  /** The cell of a name that stands on it. */
  cellOf: Map<string, number>;
  /** By line, the block; empty if it is none, or is that of the line above. */
  blocks: string[];
  /** By column, what stands in it; none where a block takes several lines. */
  titles: string[];
}

interface Place { stack: string; block: number; column: string }

/** More columns than this are broken into lines: a cell must stay large enough to be met. */
const columnsMax = 128;

/** The first part that is a number is the block; null: there is none. */
function placeOf(name: string): Place | null {
  const found = /^(?:(.*?)\.)?(\d{1,6})(?:\.|(?= )|$)(.*)$/.exec(name);
  return found && { stack: found[1] ?? '', block: Number(found[2]), column: found[3] };
}

interface Found { above: number[]; below: number[]; blocks: Map<string, Map<number, [column: number, row: number][]>>; titles: string[] }

function find(names: string[], shown: (row: number) => boolean): Found {
  const found: Found = { above: [], below: [], blocks: new Map(), titles: [] };
  const columnOf = new Map<string, number>();
  names.forEach((name, row) => {
    if (!shown(row)) return;
    const place = placeOf(name);
    if (!place) {
      (found.blocks.size === 0 ? found.above : found.below).push(row);
      return;
    }
    const stack = found.blocks.get(place.stack) ?? new Map<number, [number, number][]>();
    const cells = stack.get(place.block) ?? [];
    const column = columnOf.get(place.column) ?? columnOf.size;
    if (column === columnOf.size) found.titles.push(place.column || 'block');
    columnOf.set(place.column, column);
    cells.push([column, row]);
    found.blocks.set(place.stack, stack.set(place.block, cells));
  });
  return found;
}

/** `shown`: whether a row stands on it. */
export function modelMap(names: string[], shown: (row: number) => boolean = () => true): ModelMap {
  const { above, below, blocks, titles } = find(names, shown);
  const linesEach = Math.max(1, Math.ceil(titles.length / columnsMax));
  const alone = Math.min(columnsMax, Math.ceil(Math.sqrt(2 * names.length)));  // Where nothing has a number.
  const columns = Math.max(1, titles.length > 0 ? Math.ceil(titles.length / linesEach) : alone);
  const labels: string[] = [];
  const cells: number[] = [];
  const addLines = (count: number, label: string, rows: [number, number][]) => {
    const first = cells.length;
    for (let line = 0; line < count; line++) labels.push(line === 0 ? label : '');
    for (let i = 0; i < count * columns; i++) cells.push(-1);
    for (const [at, row] of rows) cells[first + at] = row;
  };
  const addLoose = (rows: number[]) => addLines(Math.ceil(rows.length / columns), '', rows.map((row, i) => [i, row]));
  addLoose(above);
  for (const stack of blocks.values()) {
    for (const block of [...stack.keys()].sort((a, b) => a - b)) addLines(linesEach, String(block), stack.get(block) ?? []);
  }
  addLoose(below);
  if (labels.length === 0) addLines(1, '', []);
  const cellOf = new Map<string, number>();
  cells.forEach((row, at) => row >= 0 && cellOf.set(names[row], at));
  const rowAt = Int32Array.from(cells);
  return { names, lines: labels.length, columns, rowAt, cellOf, blocks: labels, titles: linesEach === 1 ? titles : [] };
}
