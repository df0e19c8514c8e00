// lsn_count.h: the LSNs that a server gives: one count for all databases of a
// cluster, so that they rise in the order of a shard's queue, whichever database a
// run is in.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_LSN_COUNT_H_
#define BELLWETHER_SERVER_CLUSTER_LSN_COUNT_H_

#include <atomic>

#include "server/store/log_backend.h"

namespace bellwether::server {

class LsnCount {
 public:
  Lsn Next() { return ++last_; }
  // Those given from here on are above `last`.
  void RaiseTo(Lsn last) {
    Lsn now = last_;
    while (now < last && !last_.compare_exchange_weak(now, last)) {
    }
  }
  Lsn last() const { return last_; }

 private:
  std::atomic<Lsn> last_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_LSN_COUNT_H_
