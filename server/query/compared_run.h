// compared_run.h: one of two runs that are compared, as CompareRuns reads it.
//
// In a cluster the two may have different owners.  Then the server reads both
// over the same calls that any client may make (GetRun, GetMatrix, GetSeries).
// The values are bit for bit those of the owner's store, so any server finds
// what one server would.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_QUERY_COMPARED_RUN_H_
#define BELLWETHER_SERVER_QUERY_COMPARED_RUN_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "bellwether/signal_table.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

class ComparedRun {
 public:
  // Some values of one head by their steps, which rise.
  struct Values {
    std::vector<int64_t> step;
    std::vector<float> value;
  };

  // What is compared: a signal of the catalogue, or one that both jobs have named themselves.
  struct Signal {
    std::string name;
    const SignalInfo* info = nullptr;  // Null: an own signal.
    MatrixShape shape;
    std::vector<std::string> rows;  // Tensors or modules that both have: `shape` is of these, in this order.
  };

  virtual ~ComparedRun() = default;
  const std::string& asked() const { return asked_; }  // As the caller named it.
  const Layout& layout() const { return layout_; }
  int64_t step() const { return step_; }

  // Layers, and heads or experts, of the own signal of that name; none: the run has no such signal.
  virtual MatrixShape OwnShape(const std::string& name) const = 0;
  // Of all tensors or modules of a signal of these, by row.
  virtual absl::StatusOr<std::vector<std::string>> NamesOf(const Signal& signal) = 0;
  // As SeriesStore::ReadMatrix(), and ReadSeries() of the newest attempt, of each
  // of `heads`; errors also as Peers::Call().
  virtual absl::StatusOr<std::vector<float>> ReadMatrix(const Signal& signal, int64_t step, int64_t* at) = 0;
  virtual absl::StatusOr<std::vector<Values>> ReadSeries(const Signal& signal, const std::vector<Head>& heads,
                                                         int64_t begin, int64_t end, size_t points_max) = 0;

 protected:
  ComparedRun(std::string asked, const Layout& layout, int64_t step)
      : asked_(std::move(asked)), layout_(layout), step_(step) {}

 private:
  const std::string asked_;
  const Layout layout_;
  const int64_t step_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_COMPARED_RUN_H_
