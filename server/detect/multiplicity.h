// multiplicity.h: many tests at once.
//
// Pure functions; safe from any thread with own scratch.

#ifndef BELLWETHER_SERVER_DETECT_MULTIPLICITY_H_
#define BELLWETHER_SERVER_DETECT_MULTIPLICITY_H_

#include <span>
#include <vector>

namespace bellwether::server {

// P(Z > z) of a standard normal.
double NormalTail(double z);

// The largest p that is still taken when the expected share of false ones among
// those taken is to be at most `q`.  That is the largest p_(i) <= q i / m over
// the m values by rising size; -1 if none is taken.  Source: Benjamini and
// Hochberg, J. R. Stat. Soc. B 57 (1995), Section 3.
double BenjaminiHochberg(std::span<const double> p, double q, std::vector<double>* scratch);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_MULTIPLICITY_H_
