// row_snapshots.h: a run whose modules have values.

#ifndef BELLWETHER_TESTS_SUPPORT_ROW_SNAPSHOTS_H_
#define BELLWETHER_TESTS_SUPPORT_ROW_SNAPSHOTS_H_

#include <algorithm>
#include <memory>
#include <vector>

#include "server/model/row_values.h"
#include "server/store/run_table.h"

namespace bellwether::server {

// law_z and, unless it is empty, law_out_nonfinite by row.
inline void SetRows(const std::vector<float>& z, const std::vector<float>& nonfinite, RunSnapshot* run) {
  StepSample sample;
  Layout layout{.layers = 1, .heads = 1, .kv_heads = 1};
  layout.modules = static_cast<int32_t>(z.size());
  sample.Reset(layout);
  std::copy(z.begin(), z.end(), sample.Add(SignalId::kLawDifference).begin());
  for (float& value : sample.Add(SignalId::kLawVariance)) value = 1;
  if (!nonfinite.empty()) std::copy(nonfinite.begin(), nonfinite.end(), sample.Add(SignalId::kLawOutNonfinite).begin());
  auto values = std::make_shared<RowValues>();
  values->Take(sample);
  run->row_values = values;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_ROW_SNAPSHOTS_H_
