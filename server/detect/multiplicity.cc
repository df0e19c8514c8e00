#include "server/detect/multiplicity.h"

#include <algorithm>
#include <cmath>

namespace bellwether::server {

double NormalTail(double z) { return std::erfc(z / std::sqrt(2.0)) / 2; }

double BenjaminiHochberg(std::span<const double> p, double q, std::vector<double>* scratch) {
  scratch->assign(p.begin(), p.end());
  std::sort(scratch->begin(), scratch->end());
  const auto m = static_cast<double>(p.size());
  for (size_t i = scratch->size(); i > 0; --i) {
    const double value = (*scratch)[i - 1];
    if (value <= q * static_cast<double>(i) / m) return value;
  }
  return -1;
}

}  // namespace bellwether::server
