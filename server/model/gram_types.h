// gram_types.h: Gram matrices that clients ship, and what was made of them.

#ifndef BELLWETHER_SERVER_MODEL_GRAM_TYPES_H_
#define BELLWETHER_SERVER_MODEL_GRAM_TYPES_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "bellwether/signal_table.h"
#include "server/model/run_types.h"

namespace bellwether::server {

// Numbers as SpectrumKind in ingest.proto.
enum class GramOf : uint8_t { kQuery = 1, kIncrementA = 2, kIncrementB = 3 };

// One matrix of one head, as it came: ranges and sizes are checked, values are not.
struct ShippedGram {
  uint32_t attempt = 0;
  int64_t step = 0;
  Head where;
  GramOf of = GramOf::kQuery;
  int32_t n = 0;  // Rows, 1..512
  // Upper triangle by rows, n (n + 1) / 2 values; never null.
  std::shared_ptr<const std::vector<float>> upper;
};

// The signals that one matrix, or both of an increment, gave.
struct GramAnswer {
  // Numbers are on disk.
  enum class Outcome : uint8_t {
    kComputed = 0,
    kNonfinite = 1,  // A value was NaN or infinite: all signals are NaN.
    kNotAGram = 2,   // No signals.
    kDropped = 3,    // Too many waited: no signals.
  };
  struct Value {
    SignalId signal = SignalId::kNone;
    float value = 0;
  };
  static constexpr size_t kValuesMax = 4;

  uint32_t attempt = 0;
  int64_t step = 0;
  Head where;
  bool increment = false;
  Outcome outcome = Outcome::kComputed;
  uint8_t count = 0;  // Of values.
  std::array<Value, kValuesMax> values;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_GRAM_TYPES_H_
