// robust.h: how far a value lies from its peers.
//
// z = (x - median) / (1.4826 MAD): for normal data the usual z, but a few
// outliers, which is what is looked for, move neither median nor MAD.  Where
// more than half of the peers are equal, MAD is 0 and the mean absolute
// deviation, times 1.2533, takes its place; where all are equal z is 0.
// Source: Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993.

#ifndef BELLWETHER_SERVER_QUERY_ROBUST_H_
#define BELLWETHER_SERVER_QUERY_ROBUST_H_

#include <vector>

namespace bellwether::server {

struct PeerStatistics {
  double median = 0;  // NaN if there are no peers.
  double scale = 0;   // >= 0

  // NaN for a value that is not finite.
  double Score(double value) const;
};

// Takes the finite values only; an even number has the mean of the two in the
// middle as its median.
PeerStatistics DescribePeers(std::vector<double> values);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_ROBUST_H_
