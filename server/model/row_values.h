// row_values.h: the newest value of each tensor, module, rank and cell of an own signal.
//
// Rows take turns, so that a sample has few of them.  What is kept is what each row had when it was last
// measured, of the signals whose rows are exported one by one.  A new attempt begins with none.
//
// At most kNamedRowsMax floats a signal.  Not saved: after a restart of the server a row has a value once
// its turn has come.  Not thread-safe; readers share immutable copies.

#ifndef BELLWETHER_SERVER_MODEL_ROW_VALUES_H_
#define BELLWETHER_SERVER_MODEL_ROW_VALUES_H_

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "bellwether/signal_table.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

// A difference in units of rounding, and what is not finite: what else a law has is made of these.  What has a
// metric of rows in signals.proto.  And all that a job has named itself.
inline constexpr std::array kRowSignals = {SignalId::kLawZ,
                                           SignalId::kLawOutNonfinite,
                                           SignalId::kTensorGradNorm,
                                           SignalId::kTensorUpdateRatio,
                                           SignalId::kTensorMomentLag,
                                           SignalId::kTensorGradMax,
                                           SignalId::kTensorGradNonfinite,
                                           SignalId::kModuleRms,
                                           SignalId::kModuleTopShare,
                                           SignalId::kModuleNonfinite,
                                           SignalId::kRankGradNorm,
                                           SignalId::kOwnMean,
                                           SignalId::kOwnSum,
                                           SignalId::kOwnMax};

class RowValues {
 public:
  // True: some row has a new value.
  bool Take(const StepSample& sample);
  // By row, of kRowSignals[index]; rows that had none yet are not measured.
  std::span<const float> of(size_t index) const { return values_[index]; }

 private:
  uint32_t attempt_ = 0;
  std::array<std::vector<float>, kRowSignals.size()> values_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_ROW_VALUES_H_
