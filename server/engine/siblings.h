// siblings.h: this run against its siblings, in an alert.

#ifndef BELLWETHER_SERVER_ENGINE_SIBLINGS_H_
#define BELLWETHER_SERVER_ENGINE_SIBLINGS_H_

#include "server/model/alert_transition.h"
#include "server/model/row_names.h"
#include "server/model/run_types.h"
#include "server/store/baselines.h"

namespace bellwether::server {

// Adds to each piece of evidence how its signal lay, at the transition's step,
// in earlier healthy runs of the kind of `run`, and one sentence about the
// first piece for which that is known.  Changes nothing else.  Thread-safe.
// `rows`: of the run, which say what its own signals are; null = it has none.
void AddSiblings(const Baselines& baselines, const RunDescription& run, const RunRows* rows,
                 AlertTransition* transition);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_SIBLINGS_H_
