// derived_spans.h: a run's derived signals, summarized as their parts come in.
//
// A derived signal is not stored: a reader of its values divides.  Its extremes
// over a long range would take all values of both parts.  So spans of its
// summaries are kept instead, built here from every sample.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_STORE_DERIVED_SPANS_H_
#define BELLWETHER_SERVER_STORE_DERIVED_SPANS_H_

#include <cstdint>
#include <map>
#include <vector>

#include "server/model/step_sample.h"
#include "server/store/series_summary.h"
#include "server/util/byte_io.h"

namespace bellwether::server {

class DerivedSpans {
 public:
  struct Finished {
    SignalId signal;
    SpanSummary span;
  };

  explicit DerivedSpans(const Layout& layout);

  // Appends the spans that this sample completes.
  void Add(const StepSample& sample, std::vector<Finished>* finished);
  // REQUIRES: FinishAll().
  void Grow(const Layout& layout);
  // Ends the spans that have begun.
  void FinishAll(std::vector<Finished>* finished);

  void Save(ByteWriter* out) const;
  bool Restore(ByteReader* in);  // False: damaged; nothing of it is to be used.
  size_t memory_bytes() const;

 private:
  Layout layout_;
  std::vector<const SignalInfo*> signals_;    // All derived ones.
  std::map<SignalId, SpanBuilder> builders_;  // Those that were seen.
  std::vector<float> values_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_DERIVED_SPANS_H_
