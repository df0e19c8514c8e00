// Who decides here: the name that the server knows, else the one that the person gave, which this browser keeps.
import { caller } from './caller';

const given = new EventTarget();

/** '' = nobody has said it yet. */
export function whoName(): string {
  return caller.name || (localStorage.getItem('who') ?? '');
}

export function sayWho(name: string): void {
  localStorage.setItem('who', name.trim());
  given.dispatchEvent(new Event('given'));
}

export function onWho(told: () => void): void {
  given.addEventListener('given', told);
}
