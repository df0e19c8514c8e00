// sibling_view.h: which callers see what a run's siblings were like.
//
// Bands are merged over runs.  If few runs are merged, the bands show the
// values of one that the caller may not see.  In a transition they were merged
// when it was posted, for no particular caller, so only callers that may see
// every sibling see them.

#ifndef BELLWETHER_SERVER_QUERY_SIBLING_VIEW_H_
#define BELLWETHER_SERVER_QUERY_SIBLING_VIEW_H_

#include "bellwether/v1/alerts.pb.h"
#include "server/access/access.h"
#include "server/query/query_engine.h"

namespace bellwether::server {

// Takes them out if `grant` does not see all siblings that `run` has now.  Null
// `grant`: no caller is asked for an identity.
void HideSiblings(const QueryStores& stores, const Grant* grant, RunId run, v1::Transition* transition);
// Of the alert's last transition and its history.
void HideSiblings(const QueryStores& stores, const Grant* grant, RunId run, v1::Alert* alert);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_SIBLING_VIEW_H_
