#include "server/model/row_values.h"

#include <algorithm>

namespace bellwether::server {

bool RowValues::Take(const StepSample& sample) {
  if (sample.attempt < attempt_) return false;
  bool taken = false;
  if (sample.attempt > attempt_) {
    attempt_ = sample.attempt;
    for (std::vector<float>& values : values_) {
      taken |= !values.empty();
      values.clear();
    }
  }
  std::vector<float> measured;
  for (size_t i = 0; i < kRowSignals.size(); ++i) {
    if (!DeriveMatrix(sample, *FindSignal(kRowSignals[i]), &measured)) continue;
    std::vector<float>& values = values_[i];
    values.resize(std::max(values.size(), measured.size()), NotMeasured());
    for (size_t row = 0; row < measured.size(); ++row) {
      if (IsNotMeasured(measured[row])) continue;
      values[row] = measured[row];
      taken = true;
    }
  }
  return taken;
}

}  // namespace bellwether::server
