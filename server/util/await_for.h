// await_for.h: waits with a limit that the wall clock cannot move.
//
// absl's timed waits end at a point of the wall clock.  If the clock is set back by an
// hour during one, the wait lasts an hour longer, and acknowledgements, leases and saves
// wait with it.  So every wait with a limit in this server is made here; tests/tidy
// checks that.

#ifndef BELLWETHER_SERVER_UTIL_AWAIT_FOR_H_
#define BELLWETHER_SERVER_UTIL_AWAIT_FOR_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace bellwether::server {

// As absl::Mutex::AwaitWithTimeout(), by the monotonic clock: returns
// whether `condition` holds, with `mutex` held.  The caller holds `mutex`, not
// shared.  One thread of the process ends all waits; the first call that has
// to wait starts it.  That thread waits for no mutex: a wait may end a millisecond late
// for each time that its mutex was found held.  A process that forks has no
// such thread in the child.  Thread-safe.
bool AwaitFor(absl::Mutex* mutex, const absl::Condition& condition, absl::Duration timeout)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_AWAIT_FOR_H_
