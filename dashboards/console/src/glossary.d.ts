/** Entries of docs/glossary.md, which build.mjs puts in. */
declare module 'glossary' {
  /** By anchor: its title, and the entry in Markdown. */
  const entries: Record<string, { title: string; text: string; more: string }>;
  export default entries;
}
