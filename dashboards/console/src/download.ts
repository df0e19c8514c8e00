// Files out of what is shown.

function offer(content: Blob, name: string): void {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

/** A file's name out of words that may hold anything. */
function fileName(parts: (string | number)[], ending: string): string {
  return `${parts.map((part) => String(part).replace(/[^\w.-]+/g, '-')).join('_')}.${ending}`;
}

/** Comma separated; cells that hold a comma, a quote or a line's end are quoted. */
export function offerCsv(name: (string | number)[], rows: (string | number)[][]): void {
  const cell = (value: string | number) => (/[",\n]/.test(String(value)) ? `"${String(value).replace(/"/g, '""')}"` : String(value));
  const text = rows.map((row) => row.map(cell).join(',')).join('\n');
  offer(new Blob([`${text}\n`], { type: 'text/csv' }), fileName(name, 'csv'));
}

/** The canvas as it is on the screen. */
export function offerPng(name: (string | number)[], canvas: HTMLCanvasElement): void {
  canvas.toBlob((content) => content && offer(content, fileName(name, 'png')), 'image/png');
}
