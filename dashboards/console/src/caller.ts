// The page's caller, as the server knows it. The page offers no button for what the caller may not do, and each
// panel says once why. The server refuses such a call in any case.
import type { Caller, ServerInfo } from './wire';

/** Before the server has answered, everything is offered: a server without an access file asks for no name. */
export let caller: Caller = { name: '', may_act: true, may_admin: true };

/** Takes the server's answer; returns whether the caller is another than before. */
export function learn(info: ServerInfo): boolean {
  const before = JSON.stringify(caller);
  caller = info.caller ?? caller;
  return JSON.stringify(caller) !== before;
}

/** Name and roles: "alice (reads)"; "" for a caller without a name. */
export function callerWords(): string {
  const roles = caller.may_admin ? 'may do everything' : caller.may_act ? 'reads and acts' : 'reads';
  return caller.name === '' ? '' : `${caller.name} (${roles})`;
}

/** Why there are no buttons; "" where there are. */
export function whyNot(what: string): string {
  if (caller.may_act) return '';
  return `${caller.name === '' ? 'Who asks here' : `You are ${caller.name}, who`} may read. To ${what} takes the role act.`;
}
