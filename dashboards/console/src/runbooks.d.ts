// The texts of the runbooks by their names in small letters, which build.mjs puts into the page.
declare module 'runbooks' {
  const texts: Record<string, string>;
  export default texts;
}
