// sibling_view.h: who is shown what a run's siblings were like.
//
// Bands are merged over runs: of one that the caller may not see, and few others,
// they tell its values.  In a transition they were merged when it was told, for
// nobody in particular, so they are shown to those who may see every sibling.

#ifndef BELLWETHER_SERVER_QUERY_SIBLING_VIEW_H_
#define BELLWETHER_SERVER_QUERY_SIBLING_VIEW_H_

#include "bellwether/v1/alerts.pb.h"
#include "server/access/access.h"
#include "server/query/query_engine.h"

namespace bellwether::server {

// Takes them out where `grant` (null: nobody is asked) does not see all siblings
// that `run` has now.
void HideSiblings(const QueryStores& stores, const Grant* grant, RunId run, v1::Transition* transition);
// Of the alert's last transition and its history.
void HideSiblings(const QueryStores& stores, const Grant* grant, RunId run, v1::Alert* alert);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_SIBLING_VIEW_H_
